// Fetches the state once a second while the page is visible, and renders it.

import { drawing } from "./drawing.js";
import { explained, panel, rateOf } from "./panels.js";
import { bytes, compact, count, duration, el, keyed, say } from "./text.js";

const EVERY_MS = 1_000;
const PATIENCE_MS = 15_000;
const KEPT = 600;
const by = (id) => document.getElementById(id);

const kept = { history: new Map(), transactions: new Map() };
let state = null;
let shown = null;
let timer = 0;
let asking = false;
let failures = 0;

const pipeline = drawing(by("drawing"), (kind, name) => { location.hash = linkTo(kind, name); });

function linkTo(kind, name, asOf) {
  return `#${kind}/${encodeURIComponent(name)}${asOf ? `/${encodeURIComponent(asOf)}` : ""}`;
}

function chosen() {
  const [kind, name, asOf] = location.hash.slice(1).split("/").map(decoded);
  return ["source", "collection", "materialization"].includes(kind) && name ? { kind, name, asOf } : null;
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  try {
    const after = state === null ? 0 : state.now_ms;
    const answer = await fetch(`/api/state?after=${after}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) throw new Error("A token is required: open /?token=… in this browser.");
    if (!answer.ok) throw new Error(`The server responded with status ${answer.status}.`);
    remember(await answer.json());
    failures = 0;
  } catch (error) {
    failures += 1;
    lose(error);
  } finally {
    asking = false;
    timer = setTimeout(ask, Math.min(EVERY_MS * Math.max(1, failures), 5_000));
  }
  if (!failures) show();
}

function remember(told) {
  // After a clock that stepped back, or for another lake, the stored history does not apply.
  if (state !== null && (told.now_ms < state.now_ms || told.lake !== state.lake)) {
    kept.history.clear();
    kept.transactions.clear();
  }
  for (const kind of ["sources", "materializations"]) {
    for (const each of told[kind]) {
      const key = `${kind}/${each.name}`;
      const before = kept.history.get(key) ?? [];
      const last = before.at(-1)?.[0] ?? 0;
      each.history = [...before, ...each.history.filter((row) => row[0] > last)].slice(-KEPT);
      kept.history.set(key, each.history);
      if (each.transactions) {
        const known = new Map((kept.transactions.get(key) ?? []).map((one) => [one.at_ms, one]));
        for (const one of each.transactions) known.set(one.at_ms, one);
        each.transactions = [...known.values()].slice(-100);
        kept.transactions.set(key, each.transactions);
      }
    }
  }
  state = told;
}

function lose(error) {
  document.body.dataset.connection = "lost";
  say(by("connected"), "not connected");
  by("lost").hidden = false;
  const why = error.message.startsWith("A token") ? error.message : "The server does not respond. Check that Penstock is running.";
  say(by("lost"), `Connection lost. ${why} Retrying…${state ? " The data below is from the last response." : ""}`);
}

function show() {
  document.body.dataset.connection = "live";
  by("lost").hidden = true;
  say(by("connected"), `live · ${new Date(state.now_ms).toLocaleTimeString("en-GB")}`);
  say(by("lake"), state.lake);
  by("lake").title = `Penstock ${state.version}`;
  document.title = state.errors.length ? `(${state.errors.length}) Penstock` : "Penstock";
  showFigures();
  showErrors();
  by("nothing").hidden = state.sources.length + state.collections.length + state.materializations.length > 0;
  by("drawing").hidden = !by("nothing").hidden;
  showChosen();
  pipeline.update(state, by("filter").value, shown);
}

function showFigures() {
  const sum = (list, of) => list.reduce((total, each) => total + (of(each) ?? 0), 0);
  const worst = (list) => { const lags = list.map((each) => each.lag_ms).filter((ms) => typeof ms === "number"); return lags.length ? Math.max(...lags) : null; };
  const up = (list) => `${list.filter((each) => each.state === "running").length} of ${list.length}`;
  const rows = [
    ["Sources", up(state.sources), "running"],
    ["Source lag", duration(worst(state.sources)), "at most"],
    ["Rows in", compact(sum(state.sources, (each) => rateOf(each.history))), "a second"],
    ["Collections", count(state.collections.length), bytes(sum(state.collections, (each) => each.bytes))],
    ["Documents out", compact(sum(state.materializations, (each) => rateOf(each.history))), "a second"],
    ["Endpoint lag", duration(worst(state.materializations)), "at most"],
    ["Endpoints", up(state.materializations), "running"],
  ];
  keyed(by("figures"), rows, ([label]) => label,
    ([label]) => el("div", {}, el("dt", {}, label), el("dd", {}, el("b"), el("small"))),
    (item, [, text, unit]) => { say(item.querySelector("b"), text); say(item.querySelector("small"), unit); });
}

function showErrors() {
  by("errors").hidden = state.errors.length === 0;
  say(by("errors-title"), state.errors.length === 1 ? "1 error" : `${state.errors.length} errors`);
  keyed(by("errors").querySelector("ul"), state.errors, (each) => JSON.stringify(each), errorItem, () => {});
}

function errorItem(error) {
  const named = error.message.includes(error.object) ? error.message : `${error.object}: ${error.message}`;
  return el("li", {}, ...explained(error, error.name ? el("a", { href: linkTo(error.kind, error.name) }, named) : named));
}

function showChosen() {
  const wanted = chosen() ?? firstThing();
  const detail = by("detail");
  if (!wanted) {
    shown = null;
    return detail.replaceChildren();
  }
  if (shown === null || shown.kind !== wanted.kind || shown.name !== wanted.name) {
    shown = panel(wanted.kind, wanted.name, (asOf) => {
      if (asOf === undefined) return chosen()?.asOf;
      return history.replaceState(null, "", linkTo(wanted.kind, wanted.name, asOf));
    });
    detail.replaceChildren(shown.root);
  }
  const thing = state[`${shown.kind}s`].find((each) => each.name === shown.name);
  shown.update(thing, state);
}

function firstThing() {
  for (const kind of ["source", "collection", "materialization"]) {
    if (state[`${kind}s`].length) return { kind, name: state[`${kind}s`][0].name };
  }
  return null;
}

addEventListener("hashchange", () => {
  if (state === null) return;
  show();
  if (!chosen()) return scrollTo({ top: 0 });
  // On a narrow page the details are below: scroll to them, and move the focus there.
  if (getComputedStyle(by("panes")).gridTemplateColumns.split(" ").length === 1) {
    shown.heading.focus({ preventScroll: true });
    by("detail").scrollIntoView();
  }
});
addEventListener("resize", () => { if (state !== null) show(); });
document.addEventListener("visibilitychange", ask);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // A hash is a selection on this page, and this target is none.
  by("detail").focus();
});
by("filter").addEventListener("input", () => { if (state !== null) show(); });
ask();
