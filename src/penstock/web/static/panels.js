// Details of the selected object. A panel is created once and then updated in place, which
// preserves input and scroll position.

import { PHASES, lineChart, phaseBars } from "./charts.js";
import { stateAndText } from "./drawing.js";
import { bytes, compact, count, duration, el, exactly, keyed, moment, say } from "./text.js";

const KINDS = { source: "Source", collection: "Collection", materialization: "Materialization" };
const SHOWN = 50;
const LATEST_EVERY_MS = 3_000;

export function panel(kind, name, open) {
  const body = { source: sourceBody, collection: collectionBody, materialization: materializationBody }[kind](name, open);
  const pill = el("span", { class: "pill" });
  const heading = el("h2", { tabindex: "-1", id: "detail-title" }, name);
  const trouble = el("div", { class: "trouble", hidden: true });
  const root = el("div", {},
    el("div", { class: "bar" }, el("p", { class: "eyebrow" }, KINDS[kind]), pill,
      el("button", { type: "button", class: "back", onclick: toThePipeline }, "↑ Pipeline")),
    heading, trouble, ...body.parts);
  return {
    root, heading, kind, name,
    update(thing, state) {
      const level = thing ? stateAndText(kind, thing)[0] : "stopped";
      pill.dataset.state = level;
      say(pill, !thing ? "removed" : kind === "collection" ? (thing.error ? "in error" : "readable") : thing.state === "running" ? thing.phase || "starting" : thing.state);
      const error = thing?.error ?? null;
      const waits = thing?.waits_for || null;
      const frozen = thing?.degraded ?? [];
      trouble.hidden = !error && !waits && !frozen.length;
      trouble.replaceChildren(...(waits ? [el("p", { class: "waits" }, `Waits for ${waits}`)] : []), ...(error ? explained(error) : []),
        ...frozen.flatMap((each) => explained(each, `Collection ${each.collection} is in error since ${moment(each.time)}: ${each.message}`)));
      if (thing) body.update(thing, state);
    },
  };
}

function toThePipeline() {
  document.getElementById("pipeline").scrollIntoView();
  document.querySelector('.node[aria-pressed="true"]')?.focus({ preventScroll: true });
}

export function explained(error, message = error.message) {
  return [
    el("p", { class: "message" }, message),
    error.detail ? el("p", {}, error.detail) : null,
    error.hint ? el("p", { class: "hint" }, el("strong", {}, "What to do: "), error.hint) : null,
  ].filter(Boolean);
}

function sourceBody() {
  const list = facts();
  const lag = lineChart("Lag", duration);
  const rate = lineChart("Rows per second", compact);
  const slot = lineChart("WAL retained by the slot", bytes);
  const tables = table(["Table", "Phase", "Rows", "Size upstream"], "Tables");
  const partitions = table(["Partition", "Offset", "End"], "Partitions");
  const held = section("Tables", tables.root);
  const parts = section("Partitions", partitions.root);
  return {
    parts: [list.root, lag.root, rate.root, slot.root, held, parts],
    update(source) {
      const history = source.history;
      list.update([
        ["Position", source.lsn ?? source.position ?? "–", "", "mono"],
        ["Rate", `${compact(rateOf(history))} rows/s`],
        ["Lag", duration(source.lag_ms)],
        ["Behind upstream", source.lag_records === undefined ? bytes(source.lag_bytes) : `${count(source.lag_records)} records`],
        source.bad_records === undefined
          ? ["Retained WAL", bytes(source.slot_bytes), source.slot ?? ""]
          : ["Dead-lettered since start", `${count(source.bad_records)} records`],
        ["Rows since start", count(source.rows)],
        ["Bytes since start", bytes(source.bytes)],
        ["Started", moment(source.counted_since_ms), exactly(source.counted_since_ms)],
        ["Complete to", moment(source.as_of), exactly(source.as_of)],
        ["Restarts", count(source.restarts)],
        ["Server", source.server ?? "–", "", "wide"],
      ]);
      lag.update(history.map((row) => [row[0], row[3]]));
      rate.update(rates(history, 1));
      slot.root.hidden = source.slot_bytes === null || source.slot_bytes === undefined;
      if (!slot.root.hidden) slot.update(history.map((row) => [row[0], row[5]]));
      held.hidden = source.partitions !== undefined;
      parts.hidden = !held.hidden;
      partitions.update((source.partitions ?? []).map((each) => [each.partition, count(each.offset), count(each.end)]));
      tables.update((source.tables ?? []).map((each) => [each.name, each.error ?? phaseOf(each), count(each.rows), bytes(each.bytes)]));
    },
  };
}

function phaseOf(each) {
  if (each.phase === "live" || !each.estimated_rows) return each.phase;
  return `${each.phase}, ${Math.min(99, Math.floor((100 * each.rows) / each.estimated_rows))} %`;
}

function collectionBody(name, open) {
  const list = facts();
  const holds = table(["Hold", "Kind", "Keeps from", "Age"], "Holds");
  const held = section("Holds", holds.root);
  const sample = sampleOf(name, open);
  const changes = changesOf(name);
  return {
    parts: [list.root, sample.root, changes.root, held],
    update(collection, state) {
      list.update([
        ["Since", collection.since === 0 ? "the beginning" : moment(collection.since), exactly(collection.since)],
        ["Upper", moment(collection.upper), exactly(collection.upper)],
        ["Behind now", collection.upper > 1e11 && collection.upper < 1e15 ? duration(Math.max(0, state.now_ms - collection.upper)) : "–"],
        ["Size", bytes(collection.bytes)],
        ["Updates", count(collection.updates)],
        ["Batches", count(collection.batches)],
        ["Source", collection.source ?? "none"],
        ["Held back by", collection.held_back_by.join(", ") || "nothing"],
      ]);
      held.hidden = collection.holds.length === 0;
      holds.update(collection.holds.map((each) => [each.owner, each.kind, moment(each.since), duration(each.age_ms)]));
      sample.update(collection);
      changes.update(collection);
    },
  };
}

function sampleOf(name, open) {
  const input = el("input", { id: "as-of", name: "as_of", autocomplete: "off", spellcheck: "false", placeholder: "latest", "aria-describedby": "as-of-hint" });
  const note = el("p", { class: "quiet", role: "status" });
  const rows = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Rows of ${name}` });
  let begun = false;
  let asked = 0;
  const show = async () => {
    const mine = ++asked;
    const text = input.value.trim() || "latest";
    const found = await fetched("/api/rows", { collection: name, as_of: text, limit: SHOWN });
    if (mine !== asked) return;
    if (found.error) {
      rows.replaceChildren(el("div", { class: "trouble" }, ...explained(found.error)));
      say(note, "");
      return;
    }
    const repeated = found.diffs.some((each) => each !== "1");
    rows.replaceChildren(grid(found.columns, found.rows, repeated ? [["count", found.diffs]] : []));
    const many = found.rows.length === 1 ? "1 row" : `${found.rows.length} rows`;
    say(note, `${found.complete ? `All ${many}` : `${many}, of more,`} as of ${moment(found.as_of)}`);
    note.title = exactly(found.as_of);
  };
  const choose = (text) => { input.value = text; open(text); return show(); };
  const form = el("form", { class: "as-of", onsubmit: (event) => { event.preventDefault(); choose(input.value.trim()); } },
    el("label", { for: "as-of" }, "As of"), input,
    el("button", { type: "submit" }, "Show"),
    el("button", { type: "button", onclick: () => choose("earliest") }, "Earliest"),
    el("button", { type: "button", onclick: () => choose("latest") }, "Latest"));
  const hint = el("p", { class: "quiet", id: "as-of-hint" }, "Epoch milliseconds, a time with its zone such as 2026-11-15T12:00:00Z, or a relative time such as 10 minutes ago.");
  return {
    root: section("Rows", form, hint, rows, note),
    update(collection) {
      if (begun) return;
      begun = true;
      input.value = open() ?? "";
      if (input.value || (!collection.error && collection.upper > 0)) show();
      else say(note, collection.error ? "Choose a time before the error." : "No time is complete yet.");
    },
  };
}

function changesOf(name) {
  const rows = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Latest changes of ${name}` });
  const note = el("p", { class: "quiet" });
  let seen = -1;
  let last = -LATEST_EVERY_MS;
  return {
    root: section("Latest changes", rows, note),
    async update(collection) {
      const now = performance.now();
      if (collection.upper === seen || now - last < LATEST_EVERY_MS) return;
      [seen, last] = [collection.upper, now];
      const found = await fetched("/api/changes", { collection: name, limit: 20 });
      if (found.error) return rows.replaceChildren(el("div", { class: "trouble" }, ...explained(found.error)));
      const signed = found.diffs.map((each) => (each.startsWith("-") ? `−${each.slice(1)}` : `+${each}`));
      rows.replaceChildren(grid(found.columns, found.rows, [["time", found.times.map((each) => moment(Number(each)))], ["", signed]]));
      say(note, found.rows.length ? "" : "No change in the retained history.");
    },
  };
}

function materializationBody() {
  const list = facts();
  const lag = lineChart("Lag", duration);
  const rate = lineChart("Documents per second", compact);
  const bars = phaseBars("Transactions", duration);
  const done = table(["Committed", "Up to", "Documents", "Total ms", ...PHASES.map(([, name]) => name)], "Transactions");
  const bindings = table(["Collection", "Resource", "Mode", "Documents since start", "Bytes since start"], "Bindings");
  return {
    parts: [list.root, lag.root, rate.root, bars.root, section("Transaction history", done.root), section("Bindings", bindings.root)],
    update(thing) {
      list.update([
        ["Checkpoint", moment(thing.upper), exactly(thing.upper)],
        ["Lag", duration(thing.lag_ms)],
        ["Documents since start", count(thing.documents)],
        ["Bytes since start", bytes(thing.bytes)],
        ["Transactions since start", count(thing.transactions_total)],
        ["Started", moment(thing.counted_since_ms), exactly(thing.counted_since_ms)],
        ["Restarts", count(thing.restarts)],
        ["Frozen", (thing.degraded ?? []).map((each) => `${each.collection} at ${moment(each.time)}`).join(", ") || "nothing"],
      ]);
      lag.update(thing.history.map((row) => [row[0], row[2]]));
      rate.update(rates(thing.history, 1));
      bars.update(thing.transactions);
      done.update(thing.transactions.slice(-12).reverse().map((each) => {
        const took = PHASES.map(([phase]) => each[phase]);
        return [moment(each.at_ms), moment(each.upper), count(each.documents), count(took.reduce((sum, ms) => sum + (ms ?? 0), 0)), ...took.map(count)];
      }));
      bindings.update((thing.bindings ?? []).map((each) => [each.collection, each.resource, each.delta_updates ? "delta updates" : "standard", count(each.documents), bytes(each.bytes)]));
    },
  };
}

export async function fetched(path, query) {
  const asked = new URLSearchParams(query);
  try {
    return await (await fetch(`${path}?${asked}`)).json();
  } catch {
    return { error: { message: "the server did not respond", hint: "Retry when the connection is restored." } };
  }
}

function section(title, ...parts) {
  return el("section", { class: "part" }, el("h3", {}, title), ...parts);
}

function facts() {
  const root = el("dl", { class: "facts" });
  return {
    root,
    update(rows) {
      keyed(root, rows, ([label]) => label, ([label]) => el("div", {}, el("dt", {}, label), el("dd")), (item, [, text, title, kind]) => {
        const value = item.lastChild;
        say(value, text);
        value.title = title || text;
        value.className = kind === "mono" ? kind : "";
        item.className = kind === "wide" ? kind : "";
      });
    },
  };
}

const NUMBER = /^(–|[\d,.]+( [kMGT]?B)?)$/;

function table(columns, title) {
  const body = el("tbody");
  const empty = el("p", { class: "quiet" }, "None yet.");
  const whole = el("table", {}, el("thead", {}, el("tr", {}, ...columns.map((each) => el("th", { scope: "col" }, each)))), body);
  const root = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, whole, empty);
  return {
    root,
    update(rows) {
      empty.hidden = rows.length > 0;
      whole.hidden = rows.length === 0;
      body.replaceChildren(...rows.map((row) => el("tr", {}, ...row.map((each) => el("td", { class: NUMBER.test(each) ? "number" : null }, each)))));
    },
  };
}

// Rows of a collection, after the added columns in `before`.
function grid(columns, rows, before) {
  const head = [...before.map(([name]) => el("th", { scope: "col", class: "ours" }, name)),
    ...columns.map((each) => el("th", { scope: "col", title: each.type }, each.name, each.key ? el("span", { class: "key", title: "part of the key" }, " key") : null))];
  const cell = (value) => (value === null ? el("td", { class: "null" }, "null") : el("td", {}, value));
  const line = (row, at) => el("tr", {}, ...before.map(([, values]) => el("td", { class: values[at].startsWith("−") ? "ours minus" : values[at].startsWith("+") ? "ours plus" : "ours" }, values[at])), ...row.map(cell));
  return el("table", { class: "rows" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows.map(line)));
}

// Growth per second of the counter in column `at`, over the last few samples.
export function rates(history, at, over = 5) {
  return history.slice(1).map((row, number) => {
    const from = history[Math.max(0, number + 1 - over)];
    const [seconds, grown] = [(row[0] - from[0]) / 1000, row[at] - from[at]];
    return [row[0], row[at] === null || from[at] === null || seconds <= 0 || grown < 0 ? null : grown / seconds];
  });
}

export const rateOf = (history) => rates(history.slice(-11), 1, 10).at(-1)?.[1] ?? null;
