// The page: a picture, a patch that can be moved, and the service's answers about them.

import { facts, picture, send, useKey } from "./api.js";
import { certify, compare, loadCosts, mayCertify, redrawCosts } from "./proofs.js";
import { chosenMasks, draw, fits, noise, paste, patchBox, png, state, toCanvas } from "./scene.js";
import { nameOf, count, element, say, showAnswers, showGrid, showMasks, showSecondRound, showStory, tell } from "./view.js";

const $ = (id) => document.getElementById(id);
const LARGEST_SIDE = 256; // uploads are made smaller: masks of a large picture cost as much and show no more
const PLACES = 6; // places per axis that the attacker tries
const START = { sample: 6, top: 9, left: 8 }; // the printed patch fools zoo:tiny there

/* ---------- the patch ---------- */

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
      tell(error, true);
      if (error.wait) {
        await new Promise((done) => setTimeout(done, 1000 * error.wait));
        stale = true;
      }
    }
  }
  asking = false;
  $("cards").setAttribute("aria-busy", "false");
}

function show(prediction, scene, shot) {
  state.prediction = prediction;
  const patch = scene.box;
  showAnswers(prediction, scene.truth, state.model);
  showStory(prediction, { patch, patchFits: !patch || fits(patch), shapes: state.shapes, proof: state.proofs.get(scene.masks), vouched: state.vouched }, state.model);
  showGrid(prediction, shot, state.model, (boxes) => showMasks(boxes ?? suspected(), prediction.details));
  showSecondRound(prediction, state.model);
  showMasks(suspected(), prediction.details);
}

function suspected() {
  return state.prediction?.suspected ?? [];
}

/* ---------- choosing a picture ---------- */

let turn = 0; // of two pictures chosen quickly the last one stays, whichever arrives first

async function usePicture(blob, truth, words, order = ++turn) {
  const source = await toCanvas(blob, truth === undefined ? LARGEST_SIDE : 4096);
  const address = `v1/masks?height=${source.height}&width=${source.width}`;
  const plain = state.model.grid === "source" ? await facts(address) : null;
  if (order !== turn) return;
  const side = Math.min(source.height, source.width);
  const shapes = plain?.patch_shapes ?? []; // on the network's own grid nobody knows their size here
  Object.assign(state, { source, truth: truth ?? null, vouched: false, shapes, prediction: null, proofs: new Map(), costs: [], masks: state.wish });
  $("stage").style.setProperty("--ratio", source.width / source.height);
  $("stage").classList.toggle("tall", source.height > source.width);
  $("size").max = Math.max(2, Math.floor(side / 2));
  $("picture-note").textContent = typeof words === "function" ? words(source) : words;
  $("certificate").hidden = true;
  $("vouch").hidden = state.truth !== null || !state.model.classes;
  $("vouched").checked = false;
  $("label").value = "";
  mayCertify();
  const guess = Math.ceil(side / 7);
  const [height, width] = shapes.reduce((a, b) => (a[0] * a[1] >= b[0] * b[1] ? a : b), shapes[0] ?? [guess, guess]);
  state.top = Math.round((source.height - height) / 2);
  state.left = Math.round((source.width - width) / 2);
  resize(Math.min(height, width, Number($("size").max)));
  loadCosts();
}

// A label counts once the user vouches for it; a certificate for another label is void.
function vouch() {
  state.vouched = $("vouched").checked && $("label").value !== "";
  Object.assign(state, { truth: state.vouched ? Number($("label").value) : null, proofs: new Map() });
  $("certificate").hidden = true;
  mayCertify();
  redrawCosts();
  changed();
}

async function useSample(sample, button) {
  const order = ++turn;
  try {
    say("");
    for (const other of $("samples").children) {
      other.setAttribute("aria-checked", String(other === button));
      other.tabIndex = other === button ? 0 : -1;
    }
    const words = sample.label !== null ? `a clean sample: ${nameOf(sample.label, state.model.names)}` : "a sample";
    await usePicture(await picture(`v1/samples/${sample.number}`), sample.label, words, order);
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
        const clean = state.truth ?? state.prediction?.label;
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
  // Without a file the patch stays as it was.
  $("patch-file").addEventListener("cancel", () => {
    document.querySelector(`input[name=kind][value=${state.kind}]`).checked = true;
  });
  $("upload").addEventListener("click", () => $("upload-file").click());
  $("upload-file").addEventListener("change", () => fromFile($("upload-file"), async (file) => {
    await usePicture(file, undefined, (used) => `your picture ${file.name}, at ${used.height}×${used.width} px`);
    for (const other of $("samples").children) other.setAttribute("aria-checked", "false");
  }));
  $("vouched").addEventListener("change", vouch);
  $("label").addEventListener("change", () => {
    $("vouched").checked = false; // who vouched did so for the other label
    vouch();
  });
  $("attack").addEventListener("click", attack);
  $("certify").addEventListener("click", () => certify(changed));
  $("compare").addEventListener("click", compare);
  $("masks").addEventListener("input", () => {
    state.wish = state.masks = Number($("masks").value);
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
    if (error.code === "bad-image") error.message = error.message.replace("This file", file.name);
    tell(error);
  }
}

async function begin() {
  try {
    const model = await facts("v1/model");
    model.threat = model.threat.replace(/(\d)x(?=\d)/g, "$1×");
    state.model = model;
    // Masks that no slider can set, by stride or unequal, are the service's own until it is moved.
    state.wish = state.masks = model.masks && model.masks[0] === model.masks[1] ? model.masks[0] : null;
    $("masks").max = model.limits.masks;
    $("masks").value = state.masks ?? 6;
    const classes = model.names && model.names.length <= 12 ? `: ${model.names.join(", ")}` : "";
    $("facts").textContent = `${model.model}, ${count(model.classes, "class", "classes")}${classes}. Threat: ${model.threat}. Defense: ${model.defense}.`;
    const labels = Array.from({ length: model.classes ?? 0 }, (_, label) => element("option", { value: label, textContent: nameOf(label, model.names) }));
    $("label").replaceChildren(element("option", { value: "", textContent: "choose…" }), ...labels);
    state.art.set("printed", await toCanvas(await picture("page/patch.png"), LARGEST_SIDE));
    state.art.set("noise", noise(state.size));
    $("kind-note").textContent = NOTES.printed;
    const samples = await addSamples();
    const packaged = model.model === "zoo:tiny" && samples[START.sample];
    const first = samples[packaged ? START.sample : 0];
    if (!first) {
      $("patch").hidden = true;
      $("picture-note").textContent = "There are no samples here. Upload a picture to begin.";
      return;
    }
    await useSample(first, $("samples").children[first.number]);
    if (packaged) place(START.top, START.left);
  } catch (error) {
    tell(error);
  }
}

listen();
begin();
