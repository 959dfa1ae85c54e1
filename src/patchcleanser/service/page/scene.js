// The scene: the picture, the patch, and how one is pasted on the other.

import { Trouble } from "./api.js";
import { element } from "./view.js";

const $ = (id) => document.getElementById(id);

export const state = {
  model: null,
  source: null, // canvas of the clean picture
  truth: null, // its label, if known
  vouched: false, // whether the label is the user's word
  shapes: [], // the threat's patches on it
  kind: "printed",
  art: new Map(), // patch pictures by kind
  top: 0,
  left: 0,
  size: 5,
  masks: 6,
  wish: 6, // masks as they were chosen; a small picture may have room for fewer
  prediction: null, // the latest answer
  proofs: new Map(), // certificates of this picture by number of masks
  costs: [],
};

export function noise(side) {
  const canvas = element("canvas", { width: side, height: side });
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(side, side);
  for (let i = 0; i < pixels.data.length; i += 1) pixels.data[i] = i % 4 === 3 ? 255 : Math.floor(Math.random() * 256);
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

export function patchBox() {
  if (state.kind === "none") return null;
  const art = state.art.get(state.kind);
  const long = Math.max(art.width, art.height);
  const height = Math.max(1, Math.round((state.size * art.height) / long));
  const width = Math.max(1, Math.round((state.size * art.width) / long));
  const top = Math.min(Math.max(0, state.top), state.source.height - height);
  const left = Math.min(Math.max(0, state.left), state.source.width - width);
  return { top, left, height, width };
}

export function paste(canvas, box) {
  const pen = canvas.getContext("2d");
  canvas.width = state.source.width;
  canvas.height = state.source.height;
  pen.drawImage(state.source, 0, 0);
  if (!box) return canvas;
  pen.imageSmoothingEnabled = state.kind === "picture";
  pen.drawImage(state.art.get(state.kind), box.left, box.top, box.width, box.height);
  return canvas;
}

export function draw() {
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
  const beyond = fits(box) || !state.shapes.length ? "" : ", larger than the threat";
  $("size-out").textContent = `${box.height}×${box.width} px${beyond}`;
}

export function fits(box) {
  return state.shapes.some(([height, width]) => box.height <= height && box.width <= width);
}

export function png(canvas) {
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// Options of a request for so many masks per axis, where that may be chosen.
export function chosenMasks(masks) {
  return state.model.may_choose_masks && masks !== null ? { masks } : {};
}

export async function toCanvas(blob, largest) {
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
