// Elements and their text. Data becomes text only, never markup.

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes one child of `parent` for each item, in order, and reuses existing children by key.
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    const key = keyOf(item);
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
    update(child, item);
  });
  for (const removed of known.values()) removed.remove();
}

const WHOLE = new Intl.NumberFormat("en");

export const count = (number) => (number === null || number === undefined ? "–" : WHOLE.format(number));

export function compact(number) {
  if (number === null || number === undefined) return "–";
  for (const [scale, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(number) >= scale) return significant(number / (unit === "k" ? 1e3 : scale)) + unit;
  }
  return WHOLE.format(number >= 100 ? Math.round(number) : Math.round(number * 10) / 10);
}

export function bytes(number) {
  if (number === null || number === undefined) return "–";
  for (const [scale, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (number >= scale) return `${significant(number / scale)} ${unit}`;
  }
  return `${WHOLE.format(number)} B`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.floor(ms / 1000);
  const [minutes, hours, days] = [Math.floor(seconds / 60), Math.floor(seconds / 3600), Math.floor(seconds / 86400)];
  if (minutes < 60) return `${minutes} min ${seconds % 60} s`;
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${days} d ${hours % 24} h`;
}

const LAST = Number.MAX_SAFE_INTEGER;
const PLAUSIBLE = 1e11; // Smaller times are logical times, not epoch milliseconds.

export function moment(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms > LAST) return "closed";
  if (ms < PLAUSIBLE) return WHOLE.format(ms);
  const at = new Date(ms);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, "0")}`;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return new Date().toDateString() === at.toDateString() ? time : `${day} ${time}`;
}

export function exactly(ms) {
  if (ms === null || ms === undefined || ms > LAST) return "";
  return ms < PLAUSIBLE ? String(ms) : `${new Date(ms).toISOString()}  (${ms})`;
}

function significant(number) {
  return number >= 100 ? String(Math.round(number)) : number.toFixed(number >= 10 ? 1 : 2);
}
