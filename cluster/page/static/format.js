// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} value */
export function count(value) {
  return whole.format(value);
}

/** @param {number} value per second */
export function rate(value) {
  if (value >= 10 || value === 0) return count(value);
  return value.toFixed(1);
}

/** @param {number | null} seconds */
export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  return seconds < 99.5 ? `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s` : `${count(seconds)} s`;
}

/** @param {number | null} part 0 to 1 */
export function share(part) {
  return part === null ? "–" : `${(part * 100).toFixed(0)} %`;
}

/** @param {number} seconds */
export function ago(seconds) {
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(0)} h`;
}

/**
 * Enough of an id to tell it from its neighbours.
 * @param {string} id
 */
export function shortId(id) {
  const plain = id.replace(/^(chat)?cmpl-/, "");
  return plain.length > 9 ? `${plain.slice(0, 8)}…` : plain;
}

/**
 * @param {number} number
 * @param {string} one
 * @param {string} [many]
 */
export function counted(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
