// Draws what happened in the rounds of a text: each round, and the acceptance by depth.

import { depthsOf, draftLength, draftersOf } from "./progress.js";
import { counted, decimal, percent } from "./words.js";

const MAX_COLUMNS = 64;
const part = (id) => document.getElementById(id);

/** Draws the figures of a text as far as it has come; `drafter` is the one asked for, or what the service chooses from. */
export function drawFigures(progress, drafter) {
  drawRounds(progress.rounds);
  drawDepths(progress);
  part("drafting").textContent = drafting(progress.statistics, drafter);
}

function drawRounds(rounds) {
  const shown = rounds.slice(-MAX_COLUMNS);
  const tallest = Math.max(8, ...shown.map((round) => Math.max(round.accepted, round.depth ?? 0) + 1));
  part("rounds").replaceChildren(...shown.map((round) => column(round, tallest)));
  const total = rounds.reduce((sum, round) => sum + round.accepted, 0);
  const said = `${counted(rounds.length, "round")}, ${counted(total, "draft token")} accepted`;
  part("rounds").setAttribute("aria-label", said);
  if (rounds.length) part("latest-round").textContent = `Round ${rounds.length}: ${describedRound(rounds.at(-1))}.`;
  part("drafters").replaceChildren(...draftersOf(rounds).map(drafterLine));
}

function column({ accepted, closing, depth }, tallest) {
  const drawn = box("round");
  const numLost = (depth ?? accepted) - accepted - (closing === "recovered" ? 1 : 0);
  if (numLost > 0) drawn.append(sized(box("lost"), "height", numLost / tallest));
  if (closing) drawn.append(sized(box(`closing ${closing}`), "height", 1 / tallest));
  if (accepted) drawn.append(sized(box("kept"), "height", accepted / tallest));
  return drawn;
}

function describedRound(round) {
  const { count, isExact } = draftLength(round);
  const drafted = isExact ? counted(count, "token") : `at least ${counted(count, "token")}`;
  const by = [null, "none"].includes(round.drafter) ? "" : ` by ${round.drafter}`;
  const closing = round.closing ? `, 1 ${round.closing}` : "";
  return `drafted ${drafted}${by}; ${round.accepted} accepted${closing}`;
}

function drafterLine({ drafter, numRounds, drafted, accepted }) {
  const line = document.createElement("li");
  const share = drafted ? `, ${decimal(drafted / numRounds)} drafted and ${decimal(accepted / numRounds)} accepted each` : "";
  line.textContent = `${drafter === "none" ? "no drafter" : drafter}: ${counted(numRounds, "round")}${share}`;
  return line;
}

function drafting(statistics, drafter) {
  if (!statistics?.num_rounds) return `Drafter: ${drafter}.`;
  const { num_draft_tokens: numDrafted, num_rounds: numRounds, acceptance_rate: rate } = statistics;
  const share = numDrafted ? ` ${percent(rate)} of ${counted(numDrafted, "draft token")} accepted.` : "";
  return `Drafter: ${drafter}. Drafted a round: ${decimal(numDrafted / numRounds)} tokens on average.${share}`;
}

function drawDepths(progress) {
  const numRounds = progress.statistics?.num_rounds || progress.rounds.length;
  const rows = depthsOf(progress).map((depth, place) => row(depth, place + 1, numRounds));
  part("depths").tBodies[0].replaceChildren(...rows);
  part("depths-note").textContent = progress.statistics
    ? `The frame is the share of the ${counted(numRounds, "round")} that drafted so deep, the filled part what was accepted.`
    : "The share of the rounds that accepted so deep. How many had drafted so deep is known at the end.";
}

function row({ accepted, drafted }, depth, numRounds) {
  const drawn = document.createElement("tr");
  const share = box("share");
  if (drafted !== null) share.append(sized(box("drafted"), "width", drafted / numRounds));
  share.append(sized(box("taken"), "width", accepted / numRounds));
  drawn.append(cell(depth), cell(share), cell(told(accepted, drafted)));
  return drawn;
}

function told(accepted, drafted) {
  return drafted ? `${accepted} of ${drafted}, ${percent(accepted / drafted)}` : counted(accepted, "round");
}

function cell(content) {
  const drawn = document.createElement("td");
  drawn.append(content);
  return drawn;
}

function box(kind) {
  const drawn = document.createElement("span");
  drawn.className = kind;
  return drawn;
}

function sized(element, side, share) {
  element.style[side] = `${100 * share}%`;
  return element;
}
