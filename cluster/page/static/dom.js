// Elements, and nothing else. Whatever comes from a server is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | null | undefined} Child */

/**
 * @param {Element} node
 * @param {Record<string, string | number | boolean | null>} attributes null and false: without it
 * @param {Child[]} children
 */
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null>} [attributes]
 * @param {Child[]} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  return /** @type {HTMLElement} */ (filled(document.createElement(tag), attributes, children));
}

/**
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null>} [attributes]
 * @param {Child[]} children
 * @returns {SVGElement}
 */
export function drawing(tag, attributes = {}, ...children) {
  return /** @type {SVGElement} */ (filled(document.createElementNS(SVG, tag), attributes, children));
}

/**
 * @template {HTMLElement} T
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  return /** @type {T} */ (document.getElementById(id));
}

/**
 * Set the text if it is another one: a screen reader and the layout are left alone otherwise.
 * @param {Node} node
 * @param {string} text
 */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * Elements by key, made when a key is new, removed when it is gone; those that stay keep focus and state.
 * @template T, E
 * @param {HTMLElement} parent
 * @param {Map<string, {node: HTMLElement, part: E}>} known
 * @param {T[]} items in the order that they are to have
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => {node: HTMLElement, part: E}} make
 * @returns {E[]} one for each item
 */
export function keyed(parent, known, items, keyOf, make) {
  const keys = new Set(items.map(keyOf));
  for (const [key, { node }] of known) {
    if (!keys.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let before = parent.firstElementChild;
  return items.map((item) => {
    const key = keyOf(item);
    const entry = known.get(key) ?? make(item);
    known.set(key, entry);
    if (entry.node === before) before = before.nextElementSibling;
    else parent.insertBefore(entry.node, before);
    return entry.part;
  });
}
