// Packed tuples, read: the encoding of FoundationDB's tuple layer.
//
// A connector that only compares keys never has to look inside, since equal tuples are
// equal bytes. This one does, to print columns and to refuse what is no tuple. Each
// element begins with a code and ends by itself:
//
//     null 00 · bytes 01 … 00 · text 02 … 00 · integer 0b … 1d · double 21 · bool 26, 27
//
// Arrays and objects of a document are packed as bytes that hold their JSON. An integer
// that a double cannot hold becomes a BigInt.
'use strict';

const ZERO = 0x14; // The code of 0; other integers are as many codes away as they have bytes.

function unpack(packed) {
  let at = 0;
  const take = (size) => {
    if (at + size > packed.length) throw new RangeError('a packed tuple ends within an element');
    return packed.subarray(at, (at += size));
  };
  const untilZero = () => {
    const parts = [];
    for (;;) {
      const end = packed.indexOf(0, at);
      parts.push(take((end < 0 ? packed.length : end) - at));
      take(1);
      if (packed[at] !== 0xff) return Buffer.concat(parts);
      parts.push(Buffer.of(0)); // A 00 among the bytes is followed by ff.
      take(1);
    }
  };
  const integer = (distance) => {
    let size = Math.abs(distance);
    // The outermost two codes are for more than eight bytes, and say how many.
    if (size === 9) size = take(1)[0] ^ (distance < 0 ? 0xff : 0);
    let value = 0n;
    for (const octet of take(size)) value = (value << 8n) | BigInt(octet);
    if (distance < 0) value -= (1n << BigInt(8 * size)) - 1n;
    return Number.isSafeInteger(Number(value)) ? Number(value) : value;
  };
  const double = () => {
    // Ordered as bytes: the sign is inverted, and of negative numbers all the rest, too.
    const bits = take(8).readBigUInt64BE();
    const flipped = bits >> 63n ? bits ^ (1n << 63n) : ~bits;
    return new Float64Array(BigUint64Array.of(flipped).buffer)[0];
  };
  const elements = [];
  while (at < packed.length) {
    const [code] = take(1);
    if (code === 0x00) elements.push(null);
    else if (code === 0x01) elements.push(untilZero());
    else if (code === 0x02) elements.push(untilZero().toString());
    else if (code >= 0x0b && code <= 0x1d) elements.push(integer(code - ZERO));
    else if (code === 0x21) elements.push(double());
    else if (code === 0x26 || code === 0x27) elements.push(code === 0x27);
    else throw new RangeError(`there is no tuple element of code 0x${code.toString(16)} here`);
  }
  return elements;
}

module.exports = { unpack };
