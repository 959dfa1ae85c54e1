// What is shown of an answer, or of trouble. Nothing here asks the service.

import { Trouble } from "./api.js";

const $ = (id) => document.getElementById(id);
const GREY = "rgb(128 128 128)";

export function say(words) {
  $("trouble").textContent = words;
  $("trouble").hidden = !words;
}

// `again` is whether the caller tries again by itself.
export function tell(error, again = false) {
  if (!(error instanceof Trouble)) throw error;
  if (error.code === "unauthorized") $("key-form").hidden = false;
  else say(error.wait && again ? `${error.message} Trying again in ${error.wait} s.` : error.message);
}

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function called(label, names) {
  return names?.[label] ?? `class ${label}`;
}

// "a" and "b" that only differ in one being a number of things.
export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

export function showMasks(boxes, size) {
  const spans = boxes.map((box) => {
    const span = document.createElement("span");
    span.style.top = `${(100 * box.top) / size.height}%`;
    span.style.left = `${(100 * box.left) / size.width}%`;
    span.style.height = `${(100 * box.height) / size.height}%`;
    span.style.width = `${(100 * box.width) / size.width}%`;
    return span;
  });
  $("shown-masks").replaceChildren(...spans);
}

function percent(share) {
  const shown = Math.round(share * 100);
  return shown === 100 && share < 1 ? "99.9%" : `${shown}%`;
}

// The two answers side by side, and which of them a patch has changed.
export function showAnswers(found, truth, model) {
  const details = found.details;
  const alert = found.kind === "detection" && found.alert;
  $("undefended").textContent = called(details.undefended.label, model.names);
  $("undefended-note").textContent = `one look at the whole picture, ${percent(details.undefended_confidence)} sure of itself`;
  $("defended").textContent = alert ? "alert" : called(found.label, model.names);
  $("defended-note").textContent = `${count(found.classifications, "look")} through ${count(found.masks, "mask")}`;
  mark($("undefended-card"), truth === null ? null : details.undefended.label === truth);
  mark($("defended-card"), truth === null ? null : alert || found.label === truth);
}

function mark(card, right) {
  card.classList.toggle("held", right === true);
  card.classList.toggle("fooled", right === false);
}

const BADGES = { agreed: "Case I: all agree", disagreer: "Case II: a disagreer won", majority: "Case III: the majority" };

export function showStory(found, scene, model) {
  const detection = found.kind === "detection";
  const badge = $("case");
  badge.textContent = detection ? (found.alert ? "Alert" : "No alert") : BADGES[found.case];
  badge.classList.toggle("unsure", detection ? found.alert : found.case === "majority");
  $("words").textContent = detection ? detected(found, model) : decided(found, model);
  $("promise").textContent = promised(found, scene, model);
}

function decided(found, model) {
  const name = called(found.label, model.names);
  if (found.case !== "agreed" && model.defense === "challenger-masking") {
    const side = found.case === "disagreer" ? `one that says ${name}, dashed on the picture if it hides a patch` : `one that says ${name}, as most do`;
    return `${count(found.disagreers.length, "mask")} of ${found.masks} ${found.disagreers.length === 1 ? "disagrees" : "disagree"}. Masks of different labels were played against each other, two at a time, until one label was left: ${side}.`;
  }
  if (found.case === "agreed") {
    return `Whichever piece is hidden, the model says ${name}. One of the masks hides the patch, if there is one, so it cannot be what makes the model say so.`;
  }
  if (found.case === "disagreer") {
    const mask = found.details.one_mask_labels.findIndex((label, i) => label === found.label && found.disagreers.includes(i) && sameBoxes(found.details.masks[i], found.suspected));
    return `Hiding piece ${mask + 1} turns the answer into ${name}, and hiding any second piece as well changes nothing any more. That is how it looks when a patch is gone, so ${name} it is. The patch is suspected under that mask, dashed on the picture.`;
  }
  const odd = found.disagreers.length;
  return `${count(odd, "mask")} of ${found.masks} ${odd === 1 ? "disagrees" : "disagree"}, but a second mask changes each one's mind again: no single piece explains the difference. So the majority, ${name}, decides.`;
}

function detected(found, model) {
  const name = called(found.label, model.names);
  if (!found.alert) return `No mask confidently contradicts ${name}, so that is the answer.`;
  return `${count(found.reporters.length, "mask")} confidently ${found.reporters.length === 1 ? "contradicts" : "contradict"} the undefended answer ${name}. A patch may be there, so no answer is given.`;
}

function promised(found, scene, model) {
  const exact = scene.shapes.length === 1;
  const size = exact ? `of up to ${scene.shapes[0].join("×")} px` : `of the threat (${model.threat})`;
  const unsure = scene.patch && !scene.shapes.length ? " Whether yours is one of them depends on how the picture is resized." : "";
  if (scene.patch && scene.shapes.length && !scene.patchFits) {
    return `Your patch is ${scene.patch.height}×${scene.patch.width} px. The masks are made for a patch ${size}, so nothing is promised here, whatever the answer.`;
  }
  if (scene.proof?.row_certified) {
    return `This sample was certified below: no patch ${size} can change its answer, wherever you drag it and whatever is printed on it.${unsure}`;
  }
  if (scene.proof?.detection_certified) {
    return `This sample was certified for detection below: under a patch ${size} the answer is right, or an alert; it is never wrong unnoticed.${unsure}`;
  }
  if (scene.proof) {
    return `This sample could not be certified with these masks: some patch ${size} might still win. That this answer is right, if it is, can be measured but not proved.`;
  }
  return `Nothing is proved about a picture that is handed in, since it may carry a patch already. Proofs are about clean pictures with a known label, and a patch ${size}: certify a sample below.`;
}

function sameBoxes(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

// The first round: the picture under each mask, coloured by agreement with most of them.
export function showGrid(found, source, model, onShow) {
  const { masks, one_mask_labels: labels, one_mask_confidences: sure } = found.details;
  const odd = new Set(found.kind === "detection" ? found.reporters : found.disagreers);
  const across = new Set(masks.map((boxes) => boxes[0].left)).size;
  const grid = $("grid");
  grid.style.setProperty("--across", Math.min(across, 9));
  const coarse = source.width < 100;
  const cells = masks.map((boxes, i) => {
    const canvas = element("canvas", { width: source.width, height: source.height, className: coarse ? "coarse" : "" });
    const pen = canvas.getContext("2d");
    pen.drawImage(source, 0, 0);
    pen.fillStyle = GREY;
    for (const box of scaled(boxes, found.details, source)) pen.fillRect(box.left, box.top, box.width, box.height);
    const decides = found.case === "disagreer" && sameBoxes(boxes, found.suspected);
    const name = called(labels[i], model.names);
    const cell = element("button", { type: "button", className: "cell" }, canvas, element("span", { textContent: `${odd.has(i) ? "≠ " : ""}${name}` }));
    cell.classList.toggle("differ", odd.has(i) && !decides);
    cell.classList.toggle("decides", decides);
    cell.setAttribute("aria-label", `mask ${i + 1}: ${name}, ${percent(sure[i])} sure${odd.has(i) ? ", disagrees" : ""}${decides ? ", decided" : ""}`);
    cell.title = cell.getAttribute("aria-label");
    for (const when of ["mouseenter", "focus"]) cell.addEventListener(when, () => onShow(boxes));
    for (const when of ["mouseleave", "blur"]) cell.addEventListener(when, () => onShow(null));
    return cell;
  });
  const focused = [...grid.children].indexOf(document.activeElement);
  grid.replaceChildren(...cells);
  if (focused >= 0) cells[focused]?.focus(); // a new answer must not take the keyboard away
  $("round-one-words").textContent = odd.size
    ? `${count(odd.size, "mask")} of ${masks.length} ${odd.size === 1 ? "disagrees" : "disagree"}. Point at a piece to see it on the picture.`
    : `All ${masks.length} agree. Point at a piece to see it on the picture.`;
}

// Masks on the network's input are drawn where they lie on the picture, as far as both have one shape.
function scaled(boxes, size, source) {
  const down = source.height / size.height;
  const across = source.width / size.width;
  return boxes.map((b) => ({ top: b.top * down, left: b.left * across, height: b.height * down, width: b.width * across }));
}

const ROWS = 12;

export function showSecondRound(found, model) {
  const rows = found.details.second_round;
  const across = new Set(found.details.masks.map((boxes) => boxes[0].left)).size;
  const drawn = rows.slice(0, ROWS).map((row) => showRow(row, found, model, across));
  $("rows").replaceChildren(...drawn);
  if (!rows.length) {
    $("round-two-words").textContent = found.kind === "detection"
      ? "This defense has none: it raises an alert, or answers."
      : "Not needed: no mask disagrees.";
    return;
  }
  const more = rows.length > ROWS ? ` The first ${ROWS} are drawn.` : "";
  if (model.defense === "challenger-masking") {
    $("round-two-words").textContent = `Masks of different labels meet two at a time, and the loser leaves. Pale squares were not needed.${more}`;
    return;
  }
  $("round-two-words").textContent = found.case === "disagreer"
    ? `Each mask that disagrees is tried together with every other one. One of them keeps its label throughout, as the one that hides a patch would: it decides.${more}`
    : `Each mask that disagrees is tried together with every other one. None keeps its label throughout, so none is believed.${more}`;
}

function showRow(row, found, model, across) {
  const own = found.details.one_mask_labels[row.mask];
  const dots = element("div", { className: "dots" });
  dots.style.setProperty("--across", Math.min(across, 9));
  let against = 0;
  for (const label of row.labels) {
    const dot = document.createElement("i");
    if (label === null) dot.className = "unasked";
    else if (label !== own) {
      dot.className = "differ";
      dot.textContent = "≠";
      against += 1;
    }
    dot.title = label === null ? "not asked" : called(label, model.names);
    dots.append(dot);
  }
  const decides = found.case === "disagreer" && sameBoxes(found.details.masks[row.mask], found.suspected);
  const words = model.defense === "challenger-masking"
    ? `${count(against, "other mask")} won against it`
    : against
    ? `${count(against, "second mask")} ${against === 1 ? "says" : "say"} otherwise: not believed`
    : "no second mask says otherwise";
  return element(
    "div",
    { className: decides ? "row decides" : "row" },
    element("h3", { textContent: `mask ${row.mask + 1}: ${called(own, model.names)}${decides ? ", decides" : ""}` }),
    dots,
    element("p", { className: "note", textContent: words }),
  );
}

export function showCosts(costs, chosen, shares) {
  const rows = costs.map(({ masks, facts }) => {
    const box = facts.masks[0][0];
    const share = (box.height * box.width) / (facts.height * facts.width);
    const proved = shares.get(masks);
    const row = element(
      "tr",
      { className: masks === chosen ? "chosen" : "" },
      element("th", { scope: "row", textContent: `${masks}×${masks}` }),
      element("td", { className: "extra", textContent: `${percent(share)} (${box.height}×${box.width} px)` }),
      element("td", { className: "num", textContent: facts.predict_classifications.toLocaleString("en") }),
      element("td", { className: "num", textContent: facts.certify_classifications.toLocaleString("en") }),
      element("td", {}, proved === undefined ? "not looked at yet" : bar(proved)),
    );
    return row;
  });
  $("costs").replaceChildren(...rows);
}

function bar(share) {
  const line = document.createElement("span");
  line.style.setProperty("--share", `${100 * share}%`);
  return element("div", { className: "bar" }, line, element("b", { textContent: percent(share) }));
}

// Weak positions over the clean picture: a cell for the centre of each patch position.
export function showCertificate(found, source, model) {
  $("certificate").hidden = false;
  const title = $("certificate-title");
  const detection = found.kind === "detection";
  const proved = detection ? found.detection_certified : found.row_certified;
  title.textContent = proved ? (detection ? "certified for detection" : "certified") : "not certified";
  title.classList.toggle("yes", proved);
  title.classList.toggle("no", !proved);
  $("certificate-words").textContent = detection ? detectionWords(found, model) : recoveryWords(found, model);
  // A map of the network's own grid does not lie on the picture.
  const drawn = found.maps && model.grid === "source";
  if (drawn) drawMap(found.maps[0], source);
  $("map").hidden = $("map-legend").hidden = !drawn;
}

function recoveryWords(found, model) {
  const name = called(found.label, model.names);
  const cost = `It took ${count(found.classifications, "look")}.`;
  if (found.row_certified) {
    return `Whatever an attacker prints, at every position of the threat (${model.threat}), the defended answer stays ${name}. ${cost}`;
  }
  const where = found.failing_placement?.[0];
  const spot = where ? ` The proof fails first for a patch at row ${where.top}, column ${where.left}.` : "";
  const share = found.proved_share === null ? "" : `${percent(found.proved_share)} of all positions are proved harmless. `;
  return `${share}At the others some patch might change ${name}; that does not say that one does.${spot} ${cost}`;
}

function detectionWords(found, model) {
  const name = called(found.label, model.names);
  return found.detection_certified
    ? `No patch of the threat (${model.threat}) makes the answer wrong unnoticed: it is ${name}, or an alert.`
    : `Some patch might change ${name} without an alert.`;
}

function drawMap(map, source) {
  const canvas = $("map");
  const scale = Math.max(1, Math.round(480 / Math.max(source.width, source.height)));
  canvas.width = source.width * scale;
  canvas.height = source.height * scale;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(source, 0, 0, canvas.width, canvas.height);
  const style = getComputedStyle(document.documentElement);
  const colours = { 1: style.getPropertyValue("--accent"), 0: style.getPropertyValue("--bad") };
  const top = (map.height - 1) / 2;
  const left = (map.width - 1) / 2;
  map.rows.forEach((row, y) => {
    [...row].forEach((proved, x) => {
      pen.globalAlpha = proved === "1" ? 0.4 : 0.7;
      pen.fillStyle = colours[proved];
      pen.fillRect(Math.round((x + left) * scale), Math.round((y + top) * scale), scale, scale);
    });
  });
  const safe = map.rows.join("").split("1").length - 1;
  const all = map.rows.length * map.rows[0].length;
  canvas.setAttribute("aria-label", `Map of patch positions: ${safe} of ${all} proved harmless`);
}
