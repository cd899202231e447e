// Small charts, drawn again at each update in the available width.

import { el, moment, say, svg } from "./text.js";

const HEIGHT = 96;
const LEAST_SPAN = 60_000;

export function lineChart(title, format) {
  const value = el("span", { class: "value" });
  const canvas = svg("svg", { role: "img", height: HEIGHT });
  const root = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), value), canvas);
  let points = [];
  let at = null;

  function draw() {
    const width = Math.max(root.clientWidth, 120);
    const known = points.filter(([, y]) => y !== null && y !== undefined);
    const end = points.length ? points[points.length - 1][0] : 0;
    const span = Math.max(LEAST_SPAN, end - (points[0]?.[0] ?? end));
    const top = nice(Math.max(...known.map(([, y]) => y), 1) * 1.05);
    const x = (time) => width - ((end - time) / span) * width;
    const y = (number) => HEIGHT - 1 - (number / top) * (HEIGHT - 18);
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [0, 0.5, 1].map((share) =>
      svg("line", { class: "grid", x1: 0, x2: width, y1: y(top * share), y2: y(top * share) }));
    for (const run of runs(points)) {
      const line = run.map(([time, number]) => `${x(time).toFixed(1)},${y(number).toFixed(1)}`);
      const [first, last] = [x(run[0][0]).toFixed(1), x(run[run.length - 1][0]).toFixed(1)];
      parts.push(svg("path", { class: "area", d: `M${first},${y(0)}L${line.join("L")}L${last},${y(0)}Z` }));
      parts.push(svg("path", { class: "line", d: `M${line.join("L")}${run.length === 1 ? "h1" : ""}` }));
    }
    parts.push(svg("text", { class: "scale", x: 0, y: y(top) - 5 }, format(top)));
    parts.push(svg("text", { class: "scale end", x: width, y: y(top) - 5 }, `last ${Math.round(span / 60_000)} min`));
    let told = known[known.length - 1];
    if (at !== null && known.length) {
      told = known.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best));
      parts.push(svg("line", { class: "hair", x1: x(told[0]), x2: x(told[0]), y1: 14, y2: HEIGHT }));
      parts.push(svg("circle", { class: "mark", cx: x(told[0]), cy: y(told[1]), r: 3.5 }));
    }
    canvas.replaceChildren(...parts);
    say(value, told ? (at === null ? format(told[1]) : `${format(told[1])} at ${moment(told[0])}`) : "–");
    canvas.setAttribute("aria-label", `${title}: ${value.textContent}`);
  }

  canvas.addEventListener("pointermove", (event) => { at = event.offsetX; draw(); });
  canvas.addEventListener("pointerleave", () => { at = null; draw(); });
  return { root, update(now) { points = now; draw(); } };
}

export const PHASES = [
  ["opened_ms", "open"], ["read_ms", "read"], ["stored_ms", "store"],
  ["committed_ms", "commit"], ["acknowledged_ms", "acknowledge"],
];

export function phaseBars(title, format) {
  const canvas = svg("svg", { role: "img", height: HEIGHT, "aria-label": title });
  const legend = el("ul", { class: "legend" }, ...PHASES.map(([, name], at) => el("li", { class: `phase-${at}` }, name)));
  const root = el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, title), legend), canvas);
  return {
    root,
    update(transactions) {
      const width = Math.max(root.clientWidth, 120);
      const step = 11;
      const shown = transactions.slice(-Math.floor(width / step));
      const total = (each) => PHASES.reduce((sum, [phase]) => sum + (each[phase] ?? 0), 0);
      const top = nice(Math.max(...shown.map(total), 1));
      const tall = (ms) => (ms / top) * (HEIGHT - 18);
      canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      const parts = [0, 0.5, 1].map((share) =>
        svg("line", { class: "grid", x1: 0, x2: width, y1: HEIGHT - 1 - tall(top * share), y2: HEIGHT - 1 - tall(top * share) }));
      shown.forEach((each, at) => {
        const bar = svg("g", {}, svg("title", {}, `${moment(each.at_ms)}: ${format(total(each))}`));
        let below = HEIGHT - 1;
        PHASES.forEach(([phase], number) => {
          const height = tall(each[phase] ?? 0);
          below -= height;
          bar.append(svg("rect", { class: `phase-${number}`, x: width - (shown.length - at) * step, y: below, width: step - 3, height }));
        });
        parts.push(bar);
      });
      parts.push(svg("text", { class: "scale", x: 0, y: HEIGHT - 6 - tall(top) }, format(top)));
      canvas.replaceChildren(...parts);
    },
  };
}

function* runs(points) {
  let run = [];
  for (const point of points) {
    if (point[1] === null || point[1] === undefined) {
      if (run.length) yield run;
      run = [];
    } else run.push(point);
  }
  if (run.length) yield run;
}

function nice(number) {
  const scale = 10 ** Math.floor(Math.log10(number));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * scale).find((step) => step >= number);
}
