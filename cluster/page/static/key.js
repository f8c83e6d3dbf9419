// The API key that a person has typed in: kept for this tab, as long as it is open.

const NAME = "octavo-api-key";

/** @returns {Record<string, string>} the headers that a request needs */
export function keyHeaders() {
  const key = sessionStorage.getItem(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** @param {string} key */
export function keepKey(key) {
  sessionStorage.setItem(NAME, key);
}

export function hasKey() {
  return sessionStorage.getItem(NAME) !== null;
}
