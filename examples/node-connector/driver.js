// The protocol: what is asked once, and the stream of transactions.
//
// It follows the pattern "the remote store is authoritative": a commit is one segment in
// the folder, which holds documents and the runtime's checkpoint together, and Opened says
// which checkpoint that was. `folder.js` is the store.
//
// Each request of a stream is answered before the next is looked at, so much of the
// protocol comes by itself: a Load is evaluated after Acknowledged, and Flushed is sent
// after the last Loaded. What is stored is in no file before StartCommit, so a stream that
// is cancelled leaves nothing behind.
'use strict';

const { isUtf8 } = require('node:buffer');
const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const { Folder } = require('./folder');
const { unpack } = require('./tuple');

const { ABORTED, FAILED_PRECONDITION, INTERNAL, INVALID_ARGUMENT } = grpc.status;
const LOADED_BYTES = 1 << 20; // A Loaded is sent when it has so many.

// What can be configured: sent in Spec, and what configurations are held to.
const ENDPOINT = schema('Folder', {
  folder: { type: 'string', description: 'Where the segments are.' },
});
const RESOURCE = schema('Table', {
  table: { type: 'string', description: 'Its name in the folder.' },
  delta_updates: { type: 'boolean', description: 'Keep every update.' },
});

function spec() {
  return {
    endpoint_spec_schema_json: JSON.stringify(ENDPOINT),
    resource_spec_schema_json: JSON.stringify(RESOURCE),
    documentation_url: 'https://example.com/node-connector', // Put yours here.
  };
}

function validate({ materialization, endpoint_spec_json, bindings }) {
  check(materialization, 'Validate has no materialization name');
  const { folder } = configured(endpoint_spec_json, ENDPOINT, 'endpoint');
  check(!fs.existsSync(folder) || fs.statSync(folder).isDirectory(), `"${folder}" is not a folder`);
  const answers = bindings.map(({ resource_spec_json, collection }, index) => {
    const resource = configured(resource_spec_json, RESOURCE, `resource of binding ${index}`);
    const constraints = {};
    for (const { field, ptr } of collection?.projections ?? []) {
      const needed = ptr === '' || collection.key_ptrs.includes(ptr);
      constraints[field] = needed
        ? { type: 'LOCATION_REQUIRED', reason: 'Documents are kept, and found by their key.' }
        : { type: 'FIELD_OPTIONAL', reason: 'Any field can be a column.' };
    }
    const delta_updates = resource.delta_updates ?? false;
    const resource_path = [resource.table];
    return { constraints, resource_path, delta_updates, accepts_delete: !delta_updates };
  });
  return { bindings: answers };
}

function applyUpsert({ materialization, version, dry_run }) {
  const { folder, tables } = understood(materialization, version);
  folder.catchUp();
  const missing = tables.filter((each) => !exists(folder, each));
  if (missing.length && !dry_run) folder.append(() => [{ kind: 'apply', tables: missing }]);
  return { action_description: missing.map(({ table }) => `create table "${table}"`).join('\n') };
}

function applyDelete({ materialization, version, dry_run }) {
  const { name, folder, tables } = understood(materialization, version);
  folder.catchUp();
  const there = tables.filter(({ table }) => folder.tables.has(table));
  const known = there.length || folder.opened.some((each) => each.materialization === name);
  if (known && !dry_run) folder.append(() => [{ kind: 'drop', materialization: name, tables }]);
  return { action_description: there.map(({ table }) => `drop table "${table}"`).join('\n') };
}

// Which request may follow which, and after which the runtime may hang up.
const FOLLOWS = {
  nothing: ['open'],
  open: ['acknowledge'],
  acknowledge: ['load', 'flush'],
  load: ['load', 'flush'],
  flush: ['store', 'start_commit'],
  store: ['store', 'start_commit'],
  start_commit: ['acknowledge'],
};
const IDLE = ['nothing', 'open', 'acknowledge'];
const streams = new Set(); // Those that are open in this process.

class Stream {
  constructor(call) {
    this.call = call;
    this.last = 'nothing';
    this.staged = []; // Rows of this transaction.
    this.keys = new Set(); // Theirs, where a key may be there once.
    streams.add(this);
    call.on('data', (request) => this.attempt(() => this.receive(request)));
    call.on('end', () => this.attempt(() => this.end()));
    call.on('drain', () => call.resume());
    call.on('close', () => streams.delete(this)); // When it is cancelled, too.
  }

  attempt(step) {
    if (!streams.has(this)) return; // What still comes after a failure.
    try {
      step();
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    streams.delete(this);
    this.call.emit('error', status(error));
  }

  receive(request) {
    const [kind, ...more] = Object.keys(FOLLOWS).filter((each) => request[each]);
    check(kind && !more.length, 'a request must have exactly one of its fields set');
    check(FOLLOWS[this.last].includes(kind), `${kind} was sent after ${this.last}`, FAILED_PRECONDITION);
    this.last = kind;
    this[kind](request[kind]);
  }

  end() {
    check(IDLE.includes(this.last), `the stream ended after ${this.last}`, FAILED_PRECONDITION);
    this.call.end();
  }

  send(response) {
    // What the runtime does not take piles up here; do not read on meanwhile.
    if (!this.call.write(response)) this.call.pause();
  }

  open({ materialization, version, key_begin: begin, key_end: end }) {
    Object.assign(this, understood(materialization, version));
    check(begin <= end, `there are no keys from ${begin} to ${end}`);
    this.range = { materialization: this.name, begin, end };
    this.append(() => [{ kind: 'open', ...this.range }]);
    // Older streams could not commit any more; those of this process need not find out late.
    for (const older of streams) {
      const shares = older.range?.materialization === this.name && older.folder === this.folder;
      if (older === this || !shares || older.range.end < begin || end < older.range.begin) continue;
      older.fail(new Refused('another stream was opened for keys of this one', ABORTED));
    }
    const { fence, checkpoint } = this.folder.owner(this.range);
    this.fence = fence;
    this.send({ opened: { runtime_checkpoint: Buffer.from(checkpoint, 'base64') } });
  }

  acknowledge() {
    // The commit was done before StartedCommit was sent; there is nothing to wait for.
    this.send({ acknowledged: {} });
  }

  load({ binding, arena, packed_keys }) {
    const { table, delta } = this.bound(binding);
    check(!delta, `Load of binding ${binding}, which has delta updates`);
    check(packed_keys.length, 'Load has no packed_keys');
    let documents = [];
    let docs_json = [];
    let size = 0;
    packed_keys.forEach((slice, index) => {
      // Of what is not there nothing is said.
      const row = this.folder.tables.get(table)?.rows.get(bytes(arena, slice).toString('hex'));
      if (row) {
        documents.push(Buffer.from(row.document));
        docs_json.push({ begin: size, end: (size += documents.at(-1).length) });
      }
      if (!documents.length || (size < LOADED_BYTES && index + 1 < packed_keys.length)) return;
      this.send({ loaded: { binding, arena: Buffer.concat(documents), docs_json } });
      [documents, docs_json, size] = [[], [], 0];
    });
  }

  flush() {
    this.send({ flushed: {} });
  }

  // `exists` is a hint that is not needed: a row is put under its key either way.
  store({ binding, arena, packed_keys, packed_values, docs_json, exists, deletes }) {
    const { delta, keys, values } = this.bound(binding);
    const count = packed_keys.length;
    check(count, 'Store has no packed_keys');
    const lists = { packed_values, docs_json, exists, ...(deletes.length && { deletes }) };
    for (const [list, { length }] of Object.entries(lists)) {
      check(length === count, `Store has ${count} packed_keys, but ${length} ${list}`);
    }
    packed_keys.forEach((slice, i) => {
      const row = { binding, key: tuple(bytes(arena, slice), keys), deleted: deletes[i] };
      const [columns, document] = [packed_values[i], docs_json[i]].map((each) => bytes(arena, each));
      check(!row.deleted || !delta, `Store deletes from binding ${binding}, which has delta updates`);
      check(isUtf8(document), 'Store has a document that is not UTF-8');
      const key = `${binding} ${bytes(arena, slice).toString('hex')}`;
      check(delta || !this.keys.has(key), `Store has a key of binding ${binding} a second time`);
      this.keys.add(key);
      const kept = row.deleted || { values: tuple(columns, values), document: String(document) };
      this.staged.push({ ...row, ...kept });
    });
  }

  start_commit({ runtime_checkpoint }) {
    check(runtime_checkpoint.length, 'StartCommit has no runtime_checkpoint');
    const checkpoint = runtime_checkpoint.toString('base64');
    this.append(() => {
      const ours = this.folder.owner(this.range)?.fence === this.fence;
      check(ours, 'fenced off: a newer stream was opened for keys of this one', ABORTED);
      return [{ kind: 'commit', ...this.range, checkpoint, tables: this.tables }, ...this.staged];
    });
    this.staged = [];
    this.keys.clear();
    this.send({ started_commit: {} });
  }

  append(decide) {
    this.folder.append(() => {
      for (const each of this.tables) {
        check(exists(this.folder, each), `table "${each.table}" was not applied`, FAILED_PRECONDITION);
      }
      return decide();
    });
  }

  bound(binding) {
    check(binding < this.tables.length, `there is no binding ${binding}`);
    return this.tables[binding];
  }
}

// An error that the runtime is told: what is wrong and, on a second line, what to do.
class Refused extends Error {
  constructor(message, code) {
    super(message);
    this.status = code;
  }
}

function check(fine, message, code = INVALID_ARGUMENT) {
  if (!fine) throw new Refused(message, code);
}

function status(error) {
  const code = error.status ?? (error instanceof RangeError ? INVALID_ARGUMENT : INTERNAL);
  if (code === INTERNAL) console.error(error);
  return { code, details: error.message };
}

const folders = new Map(); // One for each location, shared by all streams.

// The parts of a MaterializationSpec that we use.
function understood(spec, version) {
  check(spec?.materialization, 'there is no name of a materialization');
  check(version, `materialization "${spec.materialization}" has no version`);
  const location = path.resolve(configured(spec.endpoint_spec_json, ENDPOINT, 'endpoint').folder);
  if (!folders.has(location)) folders.set(location, new Folder(location));
  const tables = spec.bindings.map(({ resource_path, field_selection, delta_updates }, index) => {
    const { keys, values, document } = field_selection ?? {};
    check(resource_path.length === 1, `binding ${index} must have a resource path of one name`);
    check(keys?.length && document, `binding ${index} must have keys and the root document`);
    return { table: resource_path[0], delta: delta_updates, keys, values, document };
  });
  const distinct = new Set(tables.map((each) => each.table)).size === tables.length;
  check(distinct, `materialization "${spec.materialization}" has two bindings to one table`);
  return { name: spec.materialization, folder: folders.get(location), tables };
}

function schema(title, properties) {
  const required = [Object.keys(properties)[0]];
  return { type: 'object', title, properties, required, additionalProperties: false };
}

// A configuration, if it is as its schema says; our schemas are flat.
function configured(text, { properties, required }, what) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    found = null;
  }
  const fine = found !== null && typeof found === 'object' && !Array.isArray(found);
  check(fine, `the configuration of the ${what} is not a JSON object`);
  for (const name of new Set([...required, ...Object.keys(found)])) {
    const type = properties[name]?.type;
    check(type, `the ${what} has no "${name}"\nIt has: ${Object.keys(properties).join(', ')}.`);
    const given = typeof found[name] === type && found[name] !== '';
    check(given, `"${name}" of the ${what} must be a ${type}, and not empty`);
  }
  return found;
}

// Whether the table is there; it is an error if it is, but of other keys or another mode.
function exists(folder, { table, delta, keys }) {
  const there = folder.tables.get(table);
  const same = !there || (there.delta === delta && there.keys.join() === keys.join());
  check(same, `table "${table}" is there with other keys or in another mode`, FAILED_PRECONDITION);
  return Boolean(there);
}

function bytes(arena, { begin, end }) {
  check(begin <= end && end <= arena.length, `slice [${begin}, ${end}) is not within its arena`);
  return arena.subarray(begin, end);
}

// A packed tuple in hexadecimal, if it has an element for each of the fields.
function tuple(packed, fields) {
  check(unpack(packed).length === fields.length, `a packed tuple must have ${fields.length} elements`);
  return packed.toString('hex');
}

// A method that is asked once, as gRPC calls it.
function answer(method) {
  return (call, callback) => {
    try {
      callback(null, method(call.request));
    } catch (error) {
      callback(status(error));
    }
  };
}

module.exports = {
  Spec: answer(spec),
  Validate: answer(validate),
  ApplyUpsert: answer(applyUpsert),
  ApplyDelete: answer(applyDelete),
  Transactions: (call) => new Stream(call),
};
