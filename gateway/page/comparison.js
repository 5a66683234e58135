// Tells how fast a text was with speculation, against plain decoding of the same request.

import { decimal } from "./words.js";

const part = (id) => document.getElementById(id);

/** Hides the figures of the comparison before. */
export function clearComparison() {
  part("comparison").hidden = true;
}

/** Shows where the comparison will be, so that nothing moves when it comes. */
export function announceComparison(isTogether) {
  drawSpeed("speculative", null, null);
  drawSpeed("plain", null, null);
  part("ratio").textContent = "Comparing";
  part("comparison-note").textContent = measured(isTogether);
  part("comparison").hidden = false;
}

/** Draws the two speeds; returns the sentence of their ratio. */
export function drawComparison(speculative, plain, { isGreedy, isTogether }) {
  const speeds = [speculative.tokensPerSecond, plain.tokensPerSecond];
  const said = ratioOf(...speeds);
  const fastest = Math.max(...speeds);
  drawSpeed("speculative", speeds[0], fastest);
  drawSpeed("plain", speeds[1], fastest);
  part("ratio").textContent = said;
  part("comparison-note").textContent = `${measured(isTogether)} ${texts(speculative, plain, isGreedy)}`;
  return said;
}

function ratioOf(speculative, plain) {
  if (!speculative || !plain) return "Too few tokens to compare their speeds";
  return `${decimal(speculative / plain, 2)} times the speed of plain decoding`;
}

function drawSpeed(name, speed, fastest) {
  part(`${name}-speed`).textContent = `${decimal(speed)} tokens/s`;
  part(`${name}-bar`).style.width = `${fastest ? (100 * speed) / fastest : 0}%`;
}

function measured(isTogether) {
  const order = isTogether
    ? "Both run at once, and take each other’s processor."
    : "They run one after the other, so that neither takes the other’s processor.";
  return `From the first token to the last one. ${order}`;
}

function texts(speculative, plain, isGreedy) {
  const ids = (progress) => progress.tokens.map((token) => token.id).join();
  if (ids(speculative) === ids(plain)) return "Both texts are the same, token for token.";
  return isGreedy ? "The texts differ." : "The texts differ: they are two samples of one distribution.";
}
