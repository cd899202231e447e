// Drawing of the pipeline, from sources through collections to endpoints.

import { bytes, compact, duration, el, keyed, say, svg } from "./text.js";

const DRAWN = 60;
const COLUMNS = ["source", "collection", "materialization"];

export function drawing(root, choose) {
  const edges = root.querySelector("#edges");
  const lists = Object.fromEntries(COLUMNS.map((kind) => [kind, root.querySelector(`[data-column=${kind}] ul`)]));
  const more = root.querySelector(".more");
  let links = [];
  let tabbed = null;

  function node(kind, thing) {
    const name = el("span", { class: "name" });
    const button = el("button", { type: "button", class: "node", onclick: () => choose(kind, button.dataset.name) },
      el("span", { class: "dot" }), name, el("span", { class: "meta" }), el("span", { class: "unseen state" }));
    button.addEventListener("focus", () => rove(button));
    button.dataset.kind = kind;
    button.dataset.name = thing.name;
    return el("li", {}, button);
  }

  function show(item, kind, thing, chosen) {
    const button = item.firstChild;
    const [state, meta] = stateAndText(kind, thing);
    button.dataset.state = state;
    say(button.querySelector(".name"), short(kind, thing));
    say(button.querySelector(".meta"), meta);
    say(button.querySelector(".state"), `, ${state}`);
    button.title = thing.name;
    button.setAttribute("aria-pressed", String(chosen !== null && chosen.kind === kind && chosen.name === thing.name));
  }

  // The drawing has one tab stop; arrow keys move from there.
  function rove(button) {
    for (const each of nodes()) each.tabIndex = each === button ? 0 : -1;
    tabbed = button;
  }

  const nodes = () => [...root.querySelectorAll(".node")];

  root.addEventListener("keydown", (event) => {
    const here = event.target.closest?.(".node");
    if (!here) return;
    const column = [...lists[here.dataset.kind].querySelectorAll(".node")];
    const at = column.indexOf(here);
    let next = null;
    if (event.key === "ArrowDown") next = column[at + 1];
    else if (event.key === "ArrowUp") next = column[at - 1];
    else if (event.key === "Home") next = column[0];
    else if (event.key === "End") next = column[column.length - 1];
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") next = beside(here, event.key === "ArrowRight" ? 1 : -1);
    else return;
    event.preventDefault();
    next?.focus();
  });

  function beside(here, way) {
    for (let at = COLUMNS.indexOf(here.dataset.kind) + way; COLUMNS[at]; at += way) {
      const column = [...lists[COLUMNS[at]].querySelectorAll(".node")];
      const linked = links.filter(([a, b]) => a === here || b === here).flat();
      const found = column.find((each) => linked.includes(each)) ?? column[0];
      if (found) return found;
    }
    return null;
  }

  function draw(chosen) {
    const frame = root.getBoundingClientRect();
    edges.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const paths = links.map(([from, to]) => {
      const [a, b] = [from.getBoundingClientRect(), to.getBoundingClientRect()];
      const [x1, y1, x2, y2] = [a.right - frame.left, a.top + a.height / 2 - frame.top, b.left - frame.left, b.top + b.height / 2 - frame.top];
      const middle = (x1 + x2) / 2;
      const near = [from, to].some((each) => each.getAttribute("aria-pressed") === "true");
      const state = [from, to].map((each) => each.dataset.state).find((each) => each !== "ok") ?? "ok";
      return svg("path", { class: near ? "edge near" : "edge", "data-state": state, d: `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2},${y2}` });
    });
    edges.classList.toggle("chosen", chosen !== null);
    edges.replaceChildren(...paths);
  }

  return {
    update(state, filter, chosen) {
      const wanted = filter.trim().toLowerCase();
      const collections = state.collections.filter((each) => each.name.toLowerCase().includes(wanted)).sort(inOrder);
      const drawn = collections.slice(0, DRAWN);
      const things = { source: state.sources, collection: drawn, materialization: state.materializations };
      for (const kind of COLUMNS) {
        keyed(lists[kind], things[kind], (each) => each.name, (each) => node(kind, each), (item, each) => show(item, kind, each, chosen));
      }
      const left = collections.length - drawn.length;
      more.hidden = left === 0 && (collections.length > 0 || !wanted);
      say(more, left ? `${left} more; filter to find them` : "No collection has that in its name.");
      const all = nodes();
      if (!all.includes(tabbed)) rove(all.find((each) => each.getAttribute("aria-pressed") === "true") ?? all[0]);
      else for (const each of all) each.tabIndex = each === tabbed ? 0 : -1;
      links = linked(state, lists);
      draw(chosen);
    },
    redraw: draw,
  };
}

function linked(state, lists) {
  const of = Object.fromEntries(COLUMNS.map((kind) =>
    [kind, new Map([...lists[kind].querySelectorAll(".node")].map((each) => [each.dataset.name, each]))]));
  const pairs = [];
  for (const each of state.collections) pairs.push([of.source.get(each.source), of.collection.get(each.name)]);
  for (const each of state.materializations) {
    for (const binding of each.bindings ?? []) pairs.push([of.collection.get(binding.collection), of.materialization.get(each.name)]);
  }
  return pairs.filter(([from, to]) => from && to);
}

const SLOW_MS = 30_000;

export function stateAndText(kind, thing) {
  if (kind === "collection") {
    const state = thing.error ? "errored" : "ok";
    return [state, thing.error ? "in error" : `${compact(thing.updates)} updates · ${bytes(thing.bytes)}`];
  }
  const phase = thing.state === "running" ? thing.phase || "starting" : thing.state;
  const behind = thing.lag_ms === null || thing.lag_ms === undefined ? [] : [`${duration(thing.lag_ms)} behind`];
  let state = "ok";
  if (["paused", "stopped", "ended"].includes(thing.state)) state = "stopped";
  if (["starting", "restarting"].includes(thing.state) || (thing.state === "running" && (["starting", "opening", "retrying", "waiting", "copying", "degraded"].includes(phase) || thing.lag_ms > SLOW_MS))) state = "slow";
  if (thing.error) state = ["running", "restarting"].includes(thing.state) ? "slow" : "errored";
  const usual = ["following", "storing"].includes(phase) && behind.length;
  return [state, ["stopped", "ended"].includes(thing.state) ? thing.state : [...(usual ? [] : [phase]), ...behind].join(" · ")];
}

function short(kind, thing) {
  const prefix = `${thing.source}.`;
  return kind === "collection" && thing.source && thing.name.startsWith(prefix) ? thing.name.slice(prefix.length) : thing.name;
}

// Internal collections of a source are last.
const own = (each) => Number(each.source !== null && each.name === `${each.source}_remap`);
const inOrder = (a, b) => own(a) - own(b) || (a.name < b.name ? -1 : 1);
