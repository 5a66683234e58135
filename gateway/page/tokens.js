// Draws tokens, and tells of the one that is pointed at or focused. One token at a time is a stop of the Tab key.

import { percent } from "./words.js";

const HINT = 
  "Point at a token, or go to one with Tab and the arrow keys, to read its probability under the model itself, before temperature.";
const MEANINGS = {
  accepted: "accepted: drafted, and kept by the target",
  recovered: "recovered: drawn by the target in place of a rejected draft token",
  bonus: "bonus: drawn by the target, after all draft tokens of its round",
  plain: "plain: drawn by the target, without drafts",
};
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/** The tokens of one text, in an element of the page. */
export class TokenGroup {
  constructor(element, readout, isPlain) {
    this.element = element;
    this.readout = readout;
    this.isPlain = isPlain;
    this.tokens = [];
    element.addEventListener("keydown", (event) => this.move(event));
    element.addEventListener("focusin", (event) => this.focused(event.target));
    element.addEventListener("focusout", () => this.showFocused());
    element.addEventListener("pointerover", (event) => this.show(event.target));
    element.addEventListener("pointerleave", () => this.showFocused());
    element.addEventListener("click", (event) => event.target.closest(".token")?.focus());
    this.clear();
  }

  /** Removes all tokens. */
  clear() {
    this.tokens = [];
    this.element.replaceChildren();
    this.readout.textContent = HINT;
  }

  /** Adds tokens at the end, and keeps the end in sight unless the reader has scrolled away from it. */
  add(tokens) {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    const followsEnd = scrollTop + clientHeight > scrollHeight - 40;
    this.element.append(...tokens.map((token, place) => this.drawn(token, this.tokens.length + place)));
    this.tokens.push(...tokens);
    if (followsEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  drawn(token, place) {
    const drawn = document.createElement("span");
    drawn.className = `token ${this.origin(token)}`;
    drawn.classList.toggle("breaks", token.text.startsWith("\n"));
    drawn.classList.toggle("empty", token.text === "");
    drawn.textContent = token.text;
    drawn.tabIndex = place === 0 ? 0 : -1;
    drawn.setAttribute("aria-describedby", this.readout.id);
    return drawn;
  }

  origin(token) {
    return this.isPlain && token.origin === "bonus" ? "plain" : token.origin;
  }

  move(event) {
    const step = STEPS[event.key];
    const from = placeOf(event.target);
    if (step === undefined || from < 0) return;
    event.preventDefault();
    const to = Math.min(Math.max(from + step, 0), this.tokens.length - 1);
    this.show(this.element.children[to]); // before the focus, with which the description is read
    this.element.children[to].focus();
  }

  focused(element) {
    const token = element.closest(".token");
    if (!token) return;
    this.element.querySelector('[tabindex="0"]').tabIndex = -1;
    token.tabIndex = 0;
    this.show(token);
  }

  showFocused() {
    const focused = this.element.querySelector(".token:focus");
    if (focused) this.show(focused);
    else this.readout.textContent = HINT;
  }

  show(element) {
    const place = placeOf(element);
    if (place >= 0) this.readout.textContent = this.described(this.tokens[place]);
  }

  described(token) {
    const known = token.probability === null ? "" : ` Probability ${percent(token.probability)}.`;
    const others = token.alternatives.filter((other) => other.text !== token.text);
    const shown = others.map((other) => `${quoted(other.text)} ${percent(other.probability)}`).join(", ");
    return `${quoted(token.text)} is ${MEANINGS[this.origin(token)]}.${known}${shown && ` Others: ${shown}.`}`;
  }
}

function placeOf(element) {
  return element.matches(".tokens > .token") ? Array.prototype.indexOf.call(element.parentElement.children, element) : -1;
}

function quoted(text) {
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
}
