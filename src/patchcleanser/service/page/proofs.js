// What more masks cost, what they prove, and the certificate of a clean picture.

import { facts, send } from "./api.js";
import { chosenMasks, png, state } from "./scene.js";
import { count, showCertificate, showCosts, tell } from "./view.js";

const $ = (id) => document.getElementById(id);
const FEWEST = 2; // masks per axis

export async function loadCosts() {
  const source = state.source;
  const able = state.model.may_choose_masks && state.model.grid === "source";
  $("cost-section").hidden = $("compare").hidden = !able;
  if (!able) return;
  const fewest = Math.max(FEWEST, state.model.coarse + 1); // the coarse masks are fewer
  const numbers = Array.from({ length: state.model.limits.masks - fewest + 1 }, (_, i) => i + fewest);
  const address = (masks) => `v1/masks?height=${source.height}&width=${source.width}&masks=${masks}`;
  try {
    const all = await Promise.all(numbers.map((masks) => facts(address(masks))));
    if (source !== state.source) return;
    // On small pictures more masks are sometimes just the same ones.
    const more = (masks, i) => i === 0 || all[i].masks.length > all[i - 1].masks.length;
    state.costs = numbers.map((masks, i) => ({ masks, facts: all[i] })).filter(({ masks }, i) => more(masks, i));
    $("masks").min = fewest;
    $("masks").max = state.costs.at(-1).masks;
    if (state.wish !== null) {
      $("masks").value = state.wish;
      state.masks = Number($("masks").value);
    }
    redrawCosts();
  } catch (error) {
    tell(error);
  }
}

export function redrawCosts() {
  const shares = new Map([...state.proofs].map(([masks, proof]) => [masks, proof.proved_share ?? Number(proof.detection_certified)]));
  showCosts(state.costs, state.masks, shares);
  const cost = state.costs.find(({ masks }) => masks === state.masks);
  const price = cost ? `, ${count(cost.facts.predict_classifications, "classification")} an answer` : "";
  $("masks-out").textContent = state.masks === null ? "the service’s own" : `${state.masks}×${state.masks}${price}`;
}

async function prove(masks) {
  const { source, proofs } = state; // another picture, or another label of it, has proofs of its own
  if (!proofs.has(masks)) {
    const fields = { labels: [state.truth], maps: true, ...chosenMasks(masks) };
    const { certificates } = await send("v1/certify", [await png(source)], fields);
    if (proofs !== state.proofs) return null;
    proofs.set(masks, certificates[0]);
    redrawCosts();
  }
  return proofs.get(masks);
}

export async function certify(then) {
  await whileBusy("Computing every two-mask label…", async () => {
    const proof = await prove(state.masks);
    if (!proof) return;
    showCertificate(proof, state.source, state.model, state.vouched);
    then();
  });
}

export async function compare() {
  await whileBusy("One number of masks after the other…", async () => {
    for (const { masks } of state.costs) if (!await prove(masks)) return;
  });
}

async function whileBusy(words, work) {
  const { proofs } = state;
  $("certify").disabled = $("compare").disabled = true;
  $("certify-note").textContent = words;
  try {
    await work();
  } catch (error) {
    tell(error);
  }
  if (proofs === state.proofs) mayCertify();
}

// Only a picture with a label can be certified.
export function mayCertify() {
  const labelled = state.truth !== null;
  $("certify").disabled = $("compare").disabled = !labelled;
  $("certify-note").textContent = labelled ? "" : "The true label of this picture is not known here.";
}
