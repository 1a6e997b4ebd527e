// The stream of messages from the server: one request that is answered for as long as it lasts.
// The format is told in message.py.

export class KeyNeeded extends Error {}

const ARRAYS = { Uint32Array, Int32Array, Float32Array };

function decoded(buffer) {
  const headSize = new DataView(buffer).getUint32(0, true);
  const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headSize)));
  let place = 4 + headSize;
  const arrays = {};
  for (const [name, type, shape] of facts.arrays) {
    const length = shape.reduce((product, size) => product * size, 1);
    arrays[name] = new ARRAYS[type](buffer, place, length);
    place += 4 * length;
  }
  return { ...facts, arrays };
}

/** Yields messages until the server ends the stream. Throws KeyNeeded, or an Error that says why. */
export async function* messages(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch("memory/stream", { headers, cache: "no-store" });
  if (response.status === 401) throw new KeyNeeded();
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answers ${response.status}`);
  }
  const reader = response.body.getReader();
  let held = new Uint8Array(0);
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const joined = new Uint8Array(held.length + value.length);
    joined.set(held);
    joined.set(value, held.length);
    held = joined;
    while (held.length >= 4) {
      const size = new DataView(held.buffer, held.byteOffset).getUint32(0, true);
      if (held.length < 4 + size) break;
      yield decoded(held.slice(4, 4 + size).buffer);
      held = held.subarray(4 + size);
    }
  }
}
