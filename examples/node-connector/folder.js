// A folder as a store with transactions: numbered segments, each created once.
//
// A segment is a file of JSON lines: what happened, then the rows of it. The store is
// what comes of replaying them in order. A segment is written beside the log, brought to
// disk, and only then linked under its number, so it is there whole or not at all.
//
// A link fails if the name is taken. Of several processes that want to write segment n
// one does; the others read it first, and look again whether they still may. That is all
// the locking there is, and it is why an Open writes a segment, too: whoever owned the
// keys before finds it when it commits.
//
// Calls to the file system are synchronous, so within a process one thing happens at a
// time. The log is never compacted, and all rows are kept in memory.
'use strict';

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');

// As a checkpoint in Opened: begin anew, whatever the recovery log says.
const START_FROM_ZERO = Buffer.from('f8ffffff0f01', 'hex').toString('base64');

class Folder {
  constructor(location) {
    this.location = location;
    this.last = 0; // The newest segment that was replayed.
    this.tables = new Map(); // name → { delta, keys, rows }
    this.opened = []; // { materialization, begin, end, fence, checkpoint }
  }

  // Append a segment of the lines that `decide` returns. It is asked again if another
  // process was faster, with the state as it is then, and may throw to give up.
  append(decide) {
    do this.catchUp();
    while (!this.#create(this.last + 1, decide()));
    this.catchUp();
  }

  // Replay what was appended since, by whomever.
  catchUp() {
    while (fs.existsSync(this.#segment(this.last + 1))) {
      const lines = fs.readFileSync(this.#segment(this.last + 1), 'utf8').trimEnd().split('\n');
      const [entry, ...rows] = lines.map((line) => JSON.parse(line));
      this.last += 1;
      this.#replay(entry, rows);
    }
  }

  // The newest Open of a range that shares keys with this one. It alone may commit. Its
  // fence is the number of the segment that it wrote, so no two are ever the same.
  owner({ materialization, begin, end }) {
    return this.opened
      .filter((each) => each.materialization === materialization)
      .filter((each) => each.begin <= end && begin <= each.end)
      .reduce((a, b) => (a && a.fence > b.fence ? a : b), undefined);
  }

  #replay(entry, rows) {
    const { kind, materialization, tables } = entry;
    if (kind === 'apply') {
      for (const { table, delta, keys } of tables) {
        if (this.tables.has(table)) continue; // Another process was faster.
        this.tables.set(table, { delta, keys, rows: delta ? [] : new Map() });
      }
    } else if (kind === 'drop') {
      for (const { table } of tables) this.tables.delete(table);
      this.opened = this.opened.filter((each) => each.materialization !== materialization);
    } else if (kind === 'open') {
      this.#open(entry);
    } else if (kind === 'commit') {
      this.owner(entry).checkpoint = entry.checkpoint;
      for (const { binding, ...row } of rows) this.#put({ ...row, fields: tables[binding] });
    }
  }

  // Where does a new owner go on? If one owner had all of its keys last, be it of the same
  // range or of a wider one that is split now, then where that one was. If several had
  // parts of them, as when ranges are joined, no checkpoint of ours is right for all: an
  // empty one leaves it to the runtime's recovery log. What the joined range itself was at
  // before it was split would be wrong, though it fits exactly: so the newest counts.
  #open({ materialization, begin, end }) {
    const before = this.owner({ materialization, begin, end });
    let checkpoint = START_FROM_ZERO;
    if (before) checkpoint = before.begin <= begin && end <= before.end ? before.checkpoint : '';
    // Ranges within the new one can never be the newest again.
    const within = (each) => begin <= each.begin && each.end <= end;
    const other = (each) => each.materialization !== materialization || !within(each);
    this.opened = this.opened.filter(other);
    this.opened.push({ materialization, begin, end, fence: this.last, checkpoint });
  }

  #put(row) {
    const { rows, delta } = this.tables.get(row.fields.table);
    if (row.deleted) rows.delete(row.key);
    else if (delta) rows.push(row);
    else rows.set(row.key, row);
  }

  // Whether the segment is ours; false if the number was taken.
  #create(number, lines) {
    fs.mkdirSync(this.location, { recursive: true });
    const draft = path.join(this.location, `draft-${crypto.randomUUID()}`);
    const text = lines.map((line) => JSON.stringify(line) + '\n').join('');
    try {
      fs.writeFileSync(draft, text, { flag: 'wx', flush: true });
      fs.linkSync(draft, this.#segment(number));
    } catch (error) {
      if (error.code === 'EEXIST') return false;
      throw error;
    } finally {
      fs.rmSync(draft, { force: true });
    }
    const folder = fs.openSync(this.location);
    fs.fsyncSync(folder); // A name is durable only with the directory that has it.
    fs.closeSync(folder);
    return true;
  }

  #segment(number) {
    return path.join(this.location, `${String(number).padStart(10, '0')}.jsonl`);
  }
}

module.exports = { Folder };
