// One text on the page: its tokens, its speed, and how far it has come.

import { Progress } from "./progress.js";
import { pieces } from "./service.js";
import { TokenGroup } from "./tokens.js";
import { counted, decimal } from "./words.js";

export class Pane {
  constructor(element, isPlain) {
    this.element = element;
    this.part = (kind) => element.querySelector(kind);
    this.tokens = new TokenGroup(this.part(".tokens"), this.part(".readout"), isPlain);
    this.progress = new Progress(0);
  }

  /** Forgets the text before. */
  clear(note = "") {
    this.progress = new Progress(performance.now());
    this.tokens.clear();
    this.part(".rate").textContent = "–";
    this.part(".counts").textContent = note;
  }

  /** Runs a request and draws it; `onPiece` is called after each piece. Returns its progress. */
  async run(request, key, signal, onPiece = () => {}) {
    this.clear("Waiting for the first token");
    for await (const piece of pieces(request, key, signal)) {
      this.progress.add(piece, performance.now());
      this.tokens.add(piece.tokens);
      this.drawFigures();
      onPiece(this.progress);
    }
    return this.progress;
  }

  drawFigures() {
    const { tokens, rounds, tokensPerRound, tokensPerSecond, firstMs, beginMs } = this.progress;
    this.part(".rate").textContent = decimal(tokensPerSecond);
    const perRound = `${decimal(tokensPerRound)} a round`;
    const first = `first after ${decimal((firstMs - beginMs) / 1000, 2)} s`;
    this.part(".counts").textContent = [
      counted(tokens.length, "token"),
      counted(rounds.length, "round"),
      perRound,
      first,
    ].join(" · ");
  }
}
