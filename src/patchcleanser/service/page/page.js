// The bench: a picture, a patch that can be moved, and what the service says of them.

import { Trouble, facts, picture, send, useKey } from "./api.js";
import { called, count, element, showAnswers, showCertificate, showCosts, showGrid, showMasks, showSecondRound, showStory } from "./view.js";

const $ = (id) => document.getElementById(id);
const LARGEST_SIDE = 256; // uploads are made smaller: masks of a large picture cost as much and show no more
const FEWEST = 2; // masks per axis
const PLACES = 6; // places per axis that the attacker tries
const START = { sample: 6, top: 9, left: 8 }; // the printed patch fools zoo:tiny there

const state = {
  model: null,
  source: null, // canvas of the clean picture
  truth: null, // its label, if known
  shapes: [], // the threat's patches on it
  kind: "printed",
  art: new Map(), // patch pictures by kind
  top: 0,
  left: 0,
  size: 5,
  masks: 6,
  found: null,
  proofs: new Map(), // certificates of this sample by number of masks
  costs: [],
};

/* ---------- trouble ---------- */

function say(words) {
  $("trouble").textContent = words;
  $("trouble").hidden = !words;
}

function tell(error) {
  if (!(error instanceof Trouble)) throw error;
  if (error.code === "unauthorized") $("key-form").hidden = false;
  else say(error.wait ? `${error.message} Trying again in ${error.wait} s.` : error.message);
}

/* ---------- the patch and the picture ---------- */

function noise(side) {
  const canvas = element("canvas", { width: side, height: side });
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(side, side);
  for (let i = 0; i < pixels.data.length; i += 1) pixels.data[i] = i % 4 === 3 ? 255 : Math.floor(Math.random() * 256);
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

function patchBox() {
  if (state.kind === "none") return null;
  const art = state.art.get(state.kind);
  const long = Math.max(art.width, art.height);
  const height = Math.max(1, Math.round((state.size * art.height) / long));
  const width = Math.max(1, Math.round((state.size * art.width) / long));
  const top = Math.min(Math.max(0, state.top), state.source.height - height);
  const left = Math.min(Math.max(0, state.left), state.source.width - width);
  return { top, left, height, width };
}

function paste(canvas, box) {
  const pen = canvas.getContext("2d");
  canvas.width = state.source.width;
  canvas.height = state.source.height;
  pen.drawImage(state.source, 0, 0);
  if (!box) return canvas;
  pen.imageSmoothingEnabled = state.kind === "picture";
  pen.drawImage(state.art.get(state.kind), box.left, box.top, box.width, box.height);
  return canvas;
}

function draw() {
  const box = patchBox();
  const { width, height } = state.source;
  paste($("picture"), box);
  $("picture").classList.toggle("coarse", width < 100);
  const patch = $("patch");
  patch.hidden = !box;
  $("size-field").hidden = $("attack").hidden = !box;
  if (!box) return;
  patch.style.top = `${(100 * box.top) / height}%`;
  patch.style.left = `${(100 * box.left) / width}%`;
  patch.style.height = `${(100 * box.height) / height}%`;
  patch.style.width = `${(100 * box.width) / width}%`;
  patch.setAttribute("aria-label", `Patch of ${box.height} by ${box.width} pixels at row ${box.top}, column ${box.left}`);
  const beyond = fits(box) ? "" : ", larger than the threat";
  $("size-out").textContent = `${box.height}×${box.width} px${beyond}`;
}

function fits(box) {
  return state.shapes.some(([height, width]) => box.height <= height && box.width <= width);
}

function place(top, left) {
  const box = patchBox() ?? { height: 1, width: 1 };
  state.top = Math.round(Math.min(Math.max(0, top), state.source.height - box.height));
  state.left = Math.round(Math.min(Math.max(0, left), state.source.width - box.width));
  changed();
}

function resize(size) {
  const most = Number($("size").max);
  state.size = Math.round(Math.min(Math.max(1, size), most));
  $("size").value = state.size;
  if (state.kind === "noise") state.art.set("noise", noise(state.size));
  place(state.top, state.left);
}

/* ---------- live answers: one question at a time, always about the latest picture ---------- */

let asking = false;
let stale = false;

function changed() {
  draw();
  stale = true;
  $("cards").setAttribute("aria-busy", "true");
  if (!asking) answer();
}

async function answer() {
  asking = true;
  while (stale) {
    stale = false;
    const shot = paste(document.createElement("canvas"), patchBox());
    const scene = { box: patchBox(), source: state.source, truth: state.truth, masks: state.masks };
    try {
      const answers = await send("v1/predict", [await png(shot)], { details: true, ...chosenMasks(state.masks) });
      say("");
      if (scene.source === state.source) show(answers.predictions[0], scene, shot);
    } catch (error) {
      tell(error);
      if (error.wait) {
        await new Promise((done) => setTimeout(done, 1000 * error.wait));
        stale = true;
      }
    }
  }
  asking = false;
  $("cards").setAttribute("aria-busy", "false");
}

function png(canvas) {
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function chosenMasks(masks) {
  return state.model.may_choose_masks ? { masks } : {};
}

function show(found, scene, shot) {
  state.found = found;
  const patch = scene.box;
  showAnswers(found, scene.truth, state.model);
  showStory(found, { patch, patchFits: !patch || fits(patch), shapes: state.shapes, proof: state.proofs.get(scene.masks) }, state.model);
  showGrid(found, shot, state.model, (boxes) => showMasks(boxes ?? suspected(), found.details));
  showSecondRound(found, state.model);
  showMasks(suspected(), found.details);
}

function suspected() {
  return state.found?.suspected ?? [];
}

/* ---------- choosing a picture ---------- */

async function toCanvas(blob, largest) {
  const bitmap = await createImageBitmap(blob).catch(() => {
    throw new Trouble("bad-image", "This file is no picture that the browser can open.");
  });
  const shrink = Math.min(1, largest / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", { width: Math.max(1, Math.round(bitmap.width * shrink)), height: Math.max(1, Math.round(bitmap.height * shrink)) });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

async function usePicture(blob, truth, words) {
  const source = await toCanvas(blob, truth === undefined ? LARGEST_SIDE : 4096);
  const asked = `v1/masks?height=${source.height}&width=${source.width}`;
  const plain = state.model.grid === "source" ? await facts(asked) : null;
  const side = Math.min(source.height, source.width);
  const shapes = plain?.patch_shapes ?? [[side, side]];
  Object.assign(state, { source, truth: truth ?? null, shapes, found: null, proofs: new Map(), costs: [] });
  $("stage").style.setProperty("--ratio", source.width / source.height);
  $("stage").classList.toggle("tall", source.height > source.width);
  $("size").max = Math.max(2, Math.floor(side / 2));
  $("picture-note").textContent = words;
  $("certificate").hidden = true;
  const known = state.truth !== null;
  $("certify").disabled = $("compare").disabled = !known;
  $("certify-note").textContent = known ? "" : "The true label of this picture is not known here.";
  const [height, width] = shapes.reduce((a, b) => (a[0] * a[1] >= b[0] * b[1] ? a : b));
  state.top = Math.round((source.height - height) / 2);
  state.left = Math.round((source.width - width) / 2);
  resize(Math.min(height, width, Number($("size").max)));
  loadCosts();
}

async function loadCosts() {
  const source = state.source;
  const able = state.model.may_choose_masks && state.model.grid === "source";
  $("cost-section").hidden = $("compare").hidden = !able;
  if (!able) return;
  const numbers = Array.from({ length: state.model.limits.masks - FEWEST + 1 }, (_, i) => i + FEWEST);
  const address = (masks) => `v1/masks?height=${source.height}&width=${source.width}&masks=${masks}`;
  try {
    const all = await Promise.all(numbers.map((masks) => facts(address(masks))));
    if (source !== state.source) return;
    // On small pictures more masks are sometimes just the same ones.
    const more = (masks, i) => i === 0 || all[i].masks.length > all[i - 1].masks.length;
    state.costs = numbers.map((masks, i) => ({ masks, facts: all[i] })).filter(({ masks }, i) => more(masks, i));
    $("masks").max = state.costs.at(-1).masks;
    state.masks = Number($("masks").value);
    redrawCosts();
  } catch (error) {
    tell(error);
  }
}

function redrawCosts() {
  const shares = new Map([...state.proofs].map(([masks, proof]) => [masks, proof.proved_share ?? Number(proof.detection_certified)]));
  showCosts(state.costs, state.masks, shares);
  const found = state.costs.find(({ masks }) => masks === state.masks);
  const looks = found ? `, ${count(found.facts.predict_classifications, "look")} an answer` : "";
  $("masks-out").textContent = `${state.masks}×${state.masks}${looks}`;
}

async function useSample(sample, button) {
  try {
    say("");
    for (const other of $("samples").children) {
      other.setAttribute("aria-checked", String(other === button));
      other.tabIndex = other === button ? 0 : -1;
    }
    const known = sample.label !== null;
    const words = known ? `a clean sample: ${called(sample.label, state.model.names)}` : "a sample";
    await usePicture(await picture(`v1/samples/${sample.number}`), sample.label, words);
  } catch (error) {
    tell(error);
  }
}

async function addSamples() {
  const { samples } = await facts("v1/samples");
  const buttons = await Promise.all(samples.map(async (sample) => {
    const image = element("img", { alt: sample.name ?? `sample ${sample.number + 1}`, className: "coarse" });
    image.src = URL.createObjectURL(await picture(`v1/samples/${sample.number}`));
    const button = element("button", { type: "button", title: image.alt }, image);
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", "false");
    button.tabIndex = -1;
    button.addEventListener("click", () => useSample(sample, button));
    return button;
  }));
  $("samples").replaceChildren(...buttons);
  $("samples").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = buttons.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    const next = buttons[(at + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  return samples;
}

/* ---------- moving the patch ---------- */

function onPointer(target, begin) {
  target.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    event.stopPropagation();
    $("patch").focus({ preventScroll: true });
    target.setPointerCapture(event.pointerId);
    const scale = state.source.width / $("stage").clientWidth;
    const move = begin();
    const onMove = (now) => move((now.clientX - event.clientX) * scale, (now.clientY - event.clientY) * scale);
    const onEnd = () => {
      target.removeEventListener("pointermove", onMove);
      target.removeEventListener("pointerup", onEnd);
      target.removeEventListener("pointercancel", onEnd);
    };
    target.addEventListener("pointermove", onMove);
    target.addEventListener("pointerup", onEnd);
    target.addEventListener("pointercancel", onEnd);
  });
}

function onKey(event) {
  const step = event.shiftKey ? Math.max(2, Math.round(state.source.width / 8)) : Math.max(1, Math.round(state.source.width / 64));
  const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
  if (moves[event.key]) place(state.top + moves[event.key][0], state.left + moves[event.key][1]);
  else if (event.key === "+" || event.key === "=") resize(state.size + 1);
  else if (event.key === "-") resize(state.size - 1);
  else return;
  event.preventDefault();
}

const NOTES = {
  printed: "Found by our own attack on the packaged model: pixels that mislead it on about three in ten pictures, wherever stuck.",
  noise: "Random pixels. They rarely fool anybody; that is why attackers optimise.",
  picture: "Any picture, shrunk onto the patch.",
  none: "The clean picture.",
};

function useKind(kind) {
  if (kind === "picture" && !state.art.has("picture")) return;
  state.kind = kind;
  $("kind-note").textContent = NOTES[kind];
  resize(state.size);
}

// The undefended label at many places; one mask that hides everything makes that cheap.
async function attack() {
  const box = patchBox();
  const before = { top: state.top, left: state.left, source: state.source };
  const spread = (room, i) => Math.round((room * i) / (PLACES - 1));
  const places = Array.from({ length: PLACES * PLACES }, (_, i) => ({
    ...box,
    top: spread(state.source.height - box.height, Math.floor(i / PLACES)),
    left: spread(state.source.width - box.width, i % PLACES),
  }));
  $("attack").disabled = true;
  try {
    let best = null;
    for (let i = 0; i < places.length; i += state.model.limits.files) {
      const some = places.slice(i, i + state.model.limits.files);
      const blobs = await Promise.all(some.map((spot) => png(paste(document.createElement("canvas"), spot))));
      const { predictions } = await send("v1/predict", blobs, { details: true, ...chosenMasks(1) });
      predictions.forEach(({ details }, j) => {
        const clean = state.truth ?? state.found?.label;
        const gain = details.undefended.label === clean ? -details.undefended_confidence : details.undefended_confidence;
        if (!best || gain > best.gain) best = { gain, ...some[j] };
      });
    }
    if (before.source === state.source) place(best.top, best.left);
  } catch (error) {
    tell(error);
  }
  $("attack").disabled = false;
}

/* ---------- certificates ---------- */

async function prove(masks) {
  const source = state.source;
  if (!state.proofs.has(masks)) {
    const fields = { labels: [state.truth], maps: true, ...chosenMasks(masks) };
    const { certificates } = await send("v1/certify", [await png(source)], fields);
    if (source !== state.source) return null;
    state.proofs.set(masks, certificates[0]);
    redrawCosts();
  }
  return state.proofs.get(masks);
}

async function certify() {
  await whileBusy("Computing every two-mask label…", async () => {
    const proof = await prove(state.masks);
    if (!proof) return;
    showCertificate(proof, state.source, state.model);
    changed();
  });
}

async function compare() {
  await whileBusy("One number of masks after the other…", async () => {
    for (const { masks } of state.costs) await prove(masks);
  });
}

async function whileBusy(words, work) {
  const source = state.source;
  $("certify").disabled = $("compare").disabled = true;
  $("certify-note").textContent = words;
  try {
    await work();
    $("certify-note").textContent = "";
  } catch (error) {
    $("certify-note").textContent = "";
    tell(error);
  }
  if (source === state.source) $("certify").disabled = $("compare").disabled = state.truth === null;
}

/* ---------- the page comes up ---------- */

function listen() {
  onPointer($("patch"), () => {
    const { top, left } = state;
    return (x, y) => place(top + y, left + x);
  });
  onPointer($("grip"), () => {
    const { size } = state;
    return (x, y) => resize(size + Math.max(x, y));
  });
  $("patch").addEventListener("keydown", onKey);
  $("size").addEventListener("input", () => resize(Number($("size").value)));
  for (const radio of document.querySelectorAll("input[name=kind]")) {
    radio.addEventListener("change", () => useKind(radio.value));
    radio.addEventListener("click", () => radio.value === "picture" && $("patch-file").click());
  }
  $("patch-file").addEventListener("change", () => fromFile($("patch-file"), async (file) => {
    state.art.set("picture", await toCanvas(file, LARGEST_SIDE));
    useKind("picture");
  }));
  // Who chooses no file stays with the patch that was there.
  $("patch-file").addEventListener("cancel", () => {
    document.querySelector(`input[name=kind][value=${state.kind}]`).checked = true;
  });
  $("upload").addEventListener("click", () => $("upload-file").click());
  $("upload-file").addEventListener("change", () => fromFile($("upload-file"), async (file) => {
    await usePicture(file, undefined, "your picture, made smaller if need be");
    for (const other of $("samples").children) other.setAttribute("aria-checked", "false");
  }));
  $("attack").addEventListener("click", attack);
  $("certify").addEventListener("click", certify);
  $("compare").addEventListener("click", compare);
  $("masks").addEventListener("input", () => {
    state.masks = Number($("masks").value);
    $("certificate").hidden = true;
    redrawCosts();
    changed();
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey($("key").value);
    $("key-form").hidden = true;
    begin();
  });
}

async function fromFile(input, use) {
  const file = input.files[0];
  input.value = "";
  if (!file) return;
  try {
    say("");
    await use(file);
  } catch (error) {
    tell(error);
  }
}

async function begin() {
  try {
    const model = await facts("v1/model");
    state.model = model;
    state.masks = model.masks?.[0] ?? 6;
    $("masks").max = model.limits.masks;
    $("masks").value = state.masks;
    const classes = model.names && model.names.length <= 12 ? `: ${model.names.join(", ")}` : "";
    $("facts").textContent = `${model.model}, ${count(model.classes, "class", "classes")}${classes}. Threat: ${model.threat}. Defense: ${model.defense}.`;
    state.art.set("printed", await toCanvas(await picture("page/patch.png"), LARGEST_SIDE));
    state.art.set("noise", noise(state.size));
    $("kind-note").textContent = NOTES.printed;
    const samples = await addSamples();
    const known = model.model === "zoo:tiny" && samples[START.sample];
    const first = samples[known ? START.sample : 0];
    if (!first) return;
    await useSample(first, $("samples").children[first.number]);
    if (known) place(START.top, START.left);
  } catch (error) {
    tell(error);
  }
}

listen();
begin();
