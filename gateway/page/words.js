// Numbers as people read them.

export function percent(share) {
  if (share > 0 && share < 0.0001) return "below 0.01 %";
  const value = 100 * share;
  return `${value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0)} %`;
}

export function decimal(number, digits = 1) {
  return number === null ? "–" : number.toFixed(digits);
}

export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
