// The page: puts the parts together, and runs one request, or two to compare, at a time.

import { asked, drafterInWords, seeded, showOffer } from "./asked.js";
import { announceComparison, clearComparison, drawComparison } from "./comparison.js";
import { drawFigures } from "./figures.js";
import { Pane } from "./pane.js";
import { servedModel } from "./service.js";
import { followTheme } from "./theme.js";
import { counted, decimal } from "./words.js";

const part = (id) => document.getElementById(id);
const speculative = new Pane(part("speculative-pane"), false);
const plain = new Pane(part("plain-pane"), true);
let offer = null; // what /v1/models says; null until it has answered
let running = null; // an AbortController while something runs

const key = () => part("key").value.trim();
const say = (words) => (part("status").textContent = words);

async function ask() {
  if (offer) return offer;
  offer = await servedModel(key());
  showOffer(offer);
  return offer;
}

/** Runs `work` unless something runs already; says how it ended. */
async function run(work) {
  if (running || !part("request").reportValidity()) return;
  running = new AbortController();
  begin();
  try {
    say(await work(await ask(), running.signal));
  } catch (problem) {
    clearComparison();
    if (problem.name === "AbortError") say("Stopped");
    else explain(problem);
  } finally {
    running.abort(); // of two runs at once, one may be left when the other fails
    running = null;
    setBusy(false);
  }
}

function begin() {
  setBusy(true);
  part("problem").hidden = true;
  clearComparison();
  say("Generating");
}

async function generate(model, signal) {
  part("plain-pane").hidden = true;
  const progress = await speculate(asked(model.id), model, signal);
  return `Done: ${counted(progress.tokens.length, "token")}, ${decimal(progress.tokensPerSecond)} tokens per second`;
}

async function compare(model, signal) {
  const request = seeded(asked(model.id));
  part("plain-pane").hidden = false;
  const isTogether = part("together").checked;
  announceComparison(isTogether);
  plain.clear("Waits for the other one to end");
  const first = speculate(request, model, signal);
  if (!isTogether) await first;
  const second = plain.run({ ...request, numDraftTokens: 0 }, key(), signal);
  const both = await Promise.all([first, second]);
  return `Done: ${drawComparison(...both, { isGreedy: request.temperature === 0, isTogether })}`;
}

function speculate(request, model, signal) {
  const drafter = drafterInWords(request, model);
  part("speculative-title").textContent = request.numDraftTokens === 0 ? "Without drafts" : "With speculation";
  return speculative.run(request, key(), signal, (progress) => drawFigures(progress, drafter));
}

function stop() {
  running?.abort();
}

function setBusy(isBusy) {
  part("generate").setAttribute("aria-disabled", isBusy);
  part("compare").setAttribute("aria-disabled", isBusy);
  part("stop").setAttribute("aria-disabled", !isBusy);
}

/** Shows what went wrong, with what may help. */
function explain(problem) {
  const isUnreachable = problem instanceof TypeError; // what fetch throws
  part("problem-text").textContent = isUnreachable ? "The service cannot be reached. Is it running?" : problem.message;
  part("as-text").hidden = !(problem.param === "messages" && part("form").value === "chat");
  part("problem").hidden = false;
  if (problem.status === 401) {
    part("key-details").open = true;
    part("key").focus();
  }
  say("Not done");
}

function sendAsText() {
  part("form").value = "text";
  part("prompt").focus();
  run(generate);
}

function onKey(event) {
  if (event.key === "Escape" && running) stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run(generate);
  }
}

function onSubmit(event) {
  event.preventDefault();
  run(generate);
}

function askAgain() {
  offer = null;
  part("problem").hidden = true;
  showServed();
}

function showServed() {
  ask().then(
    () => say("Ready"),
    (problem) => {
      part("model").textContent = "The model is not known yet";
      explain(problem);
    },
  );
}

followTheme(part("theme"));
part("request").addEventListener("submit", onSubmit);
part("compare").addEventListener("click", () => run(compare));
part("stop").addEventListener("click", stop);
part("as-text").addEventListener("click", sendAsText);
part("key").addEventListener("change", askAgain);
document.addEventListener("keydown", onKey);
showServed();
