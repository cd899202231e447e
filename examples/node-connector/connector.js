// A connector in Node: documents into a folder of files, exactly once.
//
//     node connector.js ADDRESS              serve at host:port or unix:PATH
//     node connector.js --read NAME FOLDER   print the rows of a table, as lines of JSON
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const { Folder } = require('./folder');
const { unpack } = require('./tuple');

// Documents may be larger than the 4 MB that gRPC allows by itself.
const LIMITS = { 'grpc.max_receive_message_length': -1, 'grpc.max_send_message_length': -1 };

function serve(address) {
  // Loaded here, since printing rows needs none of them.
  const grpc = require('@grpc/grpc-js');
  const { loadSync } = require('@grpc/proto-loader');
  const driver = require('./driver');

  const includeDirs = [path.join(__dirname, '..', '..', 'proto')];
  const definition = loadSync('materialize.proto', { includeDirs, keepCase: true, defaults: true });
  const { Driver } = grpc.loadPackageDefinition(definition).materialize;
  const server = new grpc.Server(LIMITS);
  server.addService(Driver.service, driver);
  if (address.startsWith('unix:')) fs.rmSync(address.slice('unix:'.length), { force: true });
  server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error) => {
    if (error) throw error;
    console.log(`listening on ${address}`);
  });
}

function read(name, location) {
  const folder = new Folder(location);
  folder.catchUp();
  for (const { fields, key, values, document } of folder.tables.get(name)?.rows.values() ?? []) {
    const columns = unpack(Buffer.from(key + values, 'hex')).map((value) =>
      typeof value === 'bigint' || Buffer.isBuffer(value) ? String(value) : JSON.stringify(value),
    );
    const cells = [...columns, document.replaceAll('\n', ' ')];
    const names = [...fields.keys, ...fields.values, fields.document];
    console.log(`{${names.map((each, i) => `${JSON.stringify(each)}:${cells[i]}`).join()}}`);
  }
}

const [first, ...rest] = process.argv.slice(2);
if (first === '--read' && rest.length === 2) read(...rest);
else if (first && !first.startsWith('-') && !rest.length) serve(first);
else {
  console.error('usage: connector.js ADDRESS | connector.js --read NAME FOLDER');
  process.exitCode = 2;
}
