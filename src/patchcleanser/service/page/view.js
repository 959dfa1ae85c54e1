// Shows answers and errors. Nothing here calls the service.

import { Trouble } from "./api.js";

const $ = (id) => document.getElementById(id);
const GREY = "rgb(128 128 128)";

export function say(words) {
  $("trouble").textContent = words;
  $("trouble").hidden = !words;
  if (words) $("trouble").scrollIntoView({ block: "nearest" });
}

// `again`: whether the caller tries again by itself.
export function tell(error, again = false) {
  if (!(error instanceof Trouble)) throw error;
  if (error.code === "unauthorized") $("key-form").hidden = false;
  else say(error.wait && again ? `${error.message} Trying again in ${error.wait} s.` : error.message);
}

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function nameOf(label, names) {
  return names?.[label] ?? `class ${label}`;
}

// A number with its noun: "1 mask", "2 masks".
export function count(number, singular, plural = `${singular}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? singular : plural}`;
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
export function showAnswers(prediction, truth, model) {
  const details = prediction.details;
  const alert = prediction.kind === "detection" && prediction.alert;
  $("undefended").textContent = nameOf(details.undefended.label, model.names);
  $("undefended-note").textContent = `one classification of the whole picture, confidence ${percent(details.undefended_confidence)}`;
  $("defended").textContent = alert ? "alert" : nameOf(prediction.label, model.names);
  $("defended-note").textContent = `${count(prediction.classifications, "classification")} with ${count(prediction.masks, "mask")}`;
  mark($("undefended-card"), truth === null ? null : details.undefended.label === truth);
  mark($("defended-card"), truth === null ? null : alert || prediction.label === truth);
}

function mark(card, right) {
  card.classList.toggle("held", right === true);
  card.classList.toggle("fooled", right === false);
}

const BADGES = { coarse: "Coarse round: all agree", agreed: "Case I: all agree", disagreer: "Case II: a disagreer won", majority: "Case III: the majority" };

export function showStory(prediction, scene, model) {
  const detection = prediction.kind === "detection";
  const badge = $("case");
  badge.textContent = detection ? (prediction.alert ? "Alert" : "No alert") : BADGES[prediction.case];
  badge.classList.toggle("unsure", detection ? prediction.alert : prediction.case === "majority");
  $("words").textContent = detection ? detected(prediction, model) : decided(prediction, model);
  $("promise").textContent = promised(scene, model);
}

function decided(prediction, model) {
  const name = nameOf(prediction.label, model.names);
  if (prediction.case === "coarse") {
    return `A few large masks come first, and under each of them the model says ${name}. One of them hides the patch, if there is one, so it cannot be what makes the model say so.`;
  }
  if (prediction.case !== "agreed" && model.defense === "challenger-masking") {
    const side = prediction.case === "disagreer" ? `one that says ${name}, dashed on the picture if it hides a patch` : `one that says ${name}, as most do`;
    return `${count(prediction.disagreers.length, "mask")} of ${prediction.masks} ${prediction.disagreers.length === 1 ? "disagrees" : "disagree"}. Masks of different labels challenged each other, two at a time, until one label was left: ${side}.`;
  }
  if (prediction.case === "agreed") {
    return `Under every mask the model says ${name}. One of the masks hides the patch, if there is one, so it cannot be what makes the model say so.`;
  }
  if (prediction.case === "disagreer") {
    const mask = prediction.details.one_mask_labels.findIndex((label, i) => label === prediction.label && prediction.disagreers.includes(i) && sameBoxes(prediction.details.masks[i], prediction.suspected));
    return `Mask ${mask + 1} turns the answer into ${name}, and any second mask beside it changes nothing any more. That is how it looks when a patch is gone, so ${name} it is. The patch is suspected under that mask, dashed on the picture.`;
  }
  const odd = prediction.disagreers.length;
  return `${count(odd, "mask")} of ${prediction.masks} ${odd === 1 ? "disagrees" : "disagree"}, but a second mask changes each one's mind again: no single mask explains the difference. So the majority, ${name}, decides.`;
}

function detected(prediction, model) {
  const name = nameOf(prediction.label, model.names);
  if (!prediction.alert) return `No mask confidently contradicts ${name}, so that is the answer.`;
  return `${count(prediction.reporters.length, "mask")} confidently ${prediction.reporters.length === 1 ? "contradicts" : "contradict"} the undefended answer ${name}. A patch may be there, so no answer is given.`;
}

function promised(scene, model) {
  const exact = scene.shapes.length === 1;
  const size = exact ? `of up to ${scene.shapes[0].join("×")} px` : `of the threat (${model.threat})`;
  const unsure = scene.patch && !scene.shapes.length ? " Whether yours is one of them depends on how the picture is resized." : "";
  if (scene.patch && scene.shapes.length && !scene.patchFits) {
    return `Your patch is ${scene.patch.height}×${scene.patch.width} px. The masks are made for a patch ${size}, so nothing is promised here, whatever the answer.`;
  }
  const word = scene.vouched ? ", on your word that it is clean and its label true" : "";
  if (scene.proof?.row_certified) {
    return `This picture was certified below${word}: no patch ${size} can change its answer, wherever you drag it and whatever is printed on it.${statistical(scene.proof)}${unsure}`;
  }
  if (scene.proof?.detection_certified) {
    return `This picture was certified for detection below${word}: under a patch ${size} the answer is right, or an alert; it is never wrong unnoticed.${unsure}`;
  }
  if (scene.proof) {
    return `This picture could not be certified with these masks: some patch ${size} might still win. That this answer is right, if it is, can be measured but not proved.`;
  }
  return `Nothing is proved about a picture that is handed in, since it may carry a patch already. Proofs are about clean pictures with a known label, and a patch ${size}: certify one below.`;
}

function sameBoxes(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}

// The first round: the picture under each mask, coloured by agreement with most of them.
export function showGrid(prediction, source, model, onShow) {
  const { masks, one_mask_labels: labels, one_mask_confidences: confidences } = prediction.details;
  const odd = new Set(prediction.kind === "detection" ? prediction.reporters : prediction.disagreers);
  const across = new Set(masks.map((boxes) => boxes[0].left)).size;
  const grid = $("grid");
  grid.style.setProperty("--across", Math.min(across, 9));
  const coarse = source.width < 100;
  const cells = masks.map((boxes, i) => {
    const canvas = element("canvas", { width: source.width, height: source.height, className: coarse ? "coarse" : "" });
    const pen = canvas.getContext("2d");
    pen.drawImage(source, 0, 0);
    pen.fillStyle = GREY;
    for (const box of scaled(boxes, prediction.details, source)) pen.fillRect(box.left, box.top, box.width, box.height);
    const decides = prediction.case === "disagreer" && sameBoxes(boxes, prediction.suspected);
    const name = nameOf(labels[i], model.names);
    const cell = element("button", { type: "button", className: "cell" }, canvas, element("span", { textContent: `${odd.has(i) ? "≠ " : ""}${name}` }));
    cell.classList.toggle("differ", odd.has(i) && !decides);
    cell.classList.toggle("decides", decides);
    cell.setAttribute("aria-label", `mask ${i + 1}: ${name}, ${percent(confidences[i])} sure${odd.has(i) ? ", disagrees" : ""}${decides ? ", decided" : ""}`);
    cell.title = cell.getAttribute("aria-label");
    for (const when of ["mouseenter", "focus"]) cell.addEventListener(when, () => onShow(boxes));
    for (const when of ["mouseleave", "blur"]) cell.addEventListener(when, () => onShow(null));
    return cell;
  });
  const focused = [...grid.children].indexOf(document.activeElement);
  grid.replaceChildren(...cells);
  if (focused >= 0) cells[focused]?.focus(); // a new answer must not take the keyboard away
  $("round-one-words").textContent = odd.size
    ? `${count(odd.size, "mask")} of ${masks.length} ${odd.size === 1 ? "disagrees" : "disagree"}. Point at a mask to see it on the picture.`
    : `All ${masks.length} agree. Point at a mask to see it on the picture.`;
}

// Masks on the network's input are drawn where they lie on the picture, as far as both have one shape.
function scaled(boxes, size, source) {
  const down = source.height / size.height;
  const across = source.width / size.width;
  return boxes.map((b) => ({ top: b.top * down, left: b.left * across, height: b.height * down, width: b.width * across }));
}

const ROWS = 12;

export function showSecondRound(prediction, model) {
  const rows = prediction.details.second_round;
  const across = new Set(prediction.details.masks.map((boxes) => boxes[0].left)).size;
  const drawn = rows.slice(0, ROWS).map((row) => showRow(row, prediction, model, across));
  $("rows").replaceChildren(...drawn);
  if (!rows.length) {
    $("round-two-words").textContent = prediction.kind === "detection"
      ? "This defense has none: it raises an alert, or answers."
      : prediction.case === "coarse" ? "Not needed: the large masks agree." : "Not needed: no mask disagrees.";
    return;
  }
  const more = rows.length > ROWS ? ` The first ${ROWS} are drawn.` : "";
  if (model.defense === "challenger-masking") {
    $("round-two-words").textContent = `Masks of different labels meet two at a time, and the loser leaves. Pale squares were not needed.${more}`;
    return;
  }
  $("round-two-words").textContent = prediction.case === "disagreer"
    ? `Each mask that disagrees is tried together with every other one. One of them keeps its label throughout, as the one that hides a patch would: it decides.${more}`
    : `Each mask that disagrees is tried together with every other one. None keeps its label throughout, so none is believed.${more}`;
}

function showRow(row, prediction, model, across) {
  const own = prediction.details.one_mask_labels[row.mask];
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
    dot.title = label === null ? "not asked" : nameOf(label, model.names);
    dots.append(dot);
  }
  const decides = prediction.case === "disagreer" && sameBoxes(prediction.details.masks[row.mask], prediction.suspected);
  const words = model.defense === "challenger-masking"
    ? `${count(against, "other mask")} won against it`
    : against
    ? `${count(against, "second mask")} ${against === 1 ? "says" : "say"} otherwise: not believed`
    : "no second mask says otherwise";
  return element(
    "div",
    { className: decides ? "row decides" : "row" },
    element("h3", { textContent: `mask ${row.mask + 1}: ${nameOf(own, model.names)}${decides ? ", decides" : ""}` }),
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
      element("td", {}, proved === undefined ? "not computed yet" : bar(proved)),
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
export function showCertificate(certificate, source, model, vouched) {
  $("certificate").hidden = false;
  const title = $("certificate-title");
  const detection = certificate.kind === "detection";
  const proved = detection ? certificate.detection_certified : certificate.row_certified;
  title.textContent = proved ? (detection ? "certified for detection" : "certified") : "not certified";
  title.classList.toggle("yes", proved);
  title.classList.toggle("no", !proved);
  const words = detection ? detectionWords(certificate, model) : recoveryWords(certificate, model);
  const subject = proved ? "The certificate" : "This answer";
  const condition = vouched ? ` ${subject} is about the picture as it is shown here (${source.height}×${source.width} px). It holds only if that is clean and its label true, for which you vouch.` : "";
  $("certificate-words").textContent = words + condition;
  // A map of the network's own grid does not lie on the picture.
  const drawn = certificate.maps && model.grid === "source";
  if (drawn) drawMap(certificate.maps[0], source);
  $("map").hidden = $("map-legend").hidden = !drawn;
}

function recoveryWords(certificate, model) {
  const name = nameOf(certificate.label, model.names);
  const cost = `It took ${count(certificate.classifications, "classification")}.${statistical(certificate)}`;
  if (certificate.row_certified) {
    return `Whatever an attacker prints, at every position of the threat (${model.threat}), the defended answer stays ${name}. ${cost}`;
  }
  const where = certificate.failing_placement?.[0];
  const spot = where ? ` The proof fails first for a patch at row ${where.top}, column ${where.left}.` : "";
  const share = certificate.proved_share === null ? "" : `${percent(certificate.proved_share)} of all positions are proved harmless. `;
  const check = certificate.proved_share === 0 ? ` If ${name} is not the answer to the clean picture either, check the label.` : "";
  return `${share}At the others ${name} is not proved: with some patch there, or without any, the answer may be another.${check || spot} ${cost}`;
}

// Labels of lower precision prove nothing, however often they are right.
function statistical(certificate) {
  return certificate.unconfirmed ? ` It is statistical, no proof: ${count(certificate.unconfirmed, "label")} had lower precision only.` : "";
}

function detectionWords(certificate, model) {
  const name = nameOf(certificate.label, model.names);
  return certificate.detection_certified
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
