/* Masks, a ring cache and a small decoder, computed in the page: what transformer_jax computes.
 *
 * The upper half is arithmetic and touches no page; tests/docs/test_play.py compares it with the
 * library. The lower half draws. Letters: T queries and keys, L layers, N heads, H their width. */
(() => {
"use strict";

/* ---- Masks: from the text of an expression to a tree ------------------------------------------ */

const LARGEST = 2 ** 31 - 1;
const SIZE = 64; // the most tokens that the page draws

class Wrong extends Error {}
const refuse = (line, field = null) => { throw Object.assign(new Wrong(line), { field }); };

/** Cut an expression in Python's notation into [kind, text, column]. */
function tokensOf(text) {
  const tokens = [];
  const pattern = /\s+|([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(\d+)(?![\w.])|(\/\/|==|!=|<=|>=|[-+*%<>=&|~()[\],:])/gy;
  while (pattern.lastIndex < text.length) {
    const at = pattern.lastIndex;
    const found = pattern.exec(text);
    if (!found) refuse(`“${text[at]}” at character ${at + 1} is not part of a mask`);
    const kind = found[1] ? "name" : found[2] ? "number" : found[3] ? "sign" : null;
    if (kind) tokens.push([kind, found[0], at]);
  }
  tokens.push(["end", "the end", text.length]);
  return tokens;
}

class Parser {
  constructor(text) {
    this.tokens = tokensOf(text);
    this.at = 0;
    let depth = 0;
    for (const [, sign] of this.tokens) {
      depth += "([~-".includes(sign) ? 1 : sign === ")" || sign === "]" ? -1 : 0;
      if (depth > 200) refuse("brackets and signs are nested more than 200 deep");
    }
  }
  get next() { return this.tokens[this.at][1]; }
  get kind() { return this.tokens[this.at][0]; }
  take() { return this.tokens[this.kind === "end" ? this.at : this.at++][1]; }
  is(text) { return this.kind !== "end" && this.next === text; }
  accept(text) { if (!this.is(text)) return false; this.at++; return true; }
  expect(text) {
    if (!this.accept(text)) refuse(`expected “${text}” before ${this.where()}`);
  }
  where() {
    return this.kind === "end" ? "the end" : `“${this.next}” at character ${this.tokens[this.at][2] + 1}`;
  }

  whole() {
    if (this.kind === "end") refuse("write a mask, such as Causal() & Window(4)");
    const mask = this.or();
    if (["and", "or", "not"].includes(this.next)) refuse(`combine masks with &, | and ~, not with ${this.next}`);
    if (this.kind !== "end") refuse(`expected &, | or the end before ${this.where()}`);
    return mask;
  }
  or() {
    let left = this.and();
    while (this.accept("|")) left = { kind: "Or", left, right: this.and() };
    return left;
  }
  and() {
    let left = this.not();
    while (this.accept("&")) left = { kind: "And", left, right: this.not() };
    return left;
  }
  not() {
    if (this.accept("~")) return { kind: "Not", mask: this.not() };
    if (this.accept("(")) { const mask = this.or(); this.expect(")"); return mask; }
    if (this.kind !== "name") refuse(`expected a mask before ${this.where()}`);
    const name = this.take().replace(/^(tj|transformer_jax)\./, "");
    if (["and", "or", "not"].includes(name)) refuse(`combine masks with &, | and ~, not with ${name}`);
    if (!Object.hasOwn(MASKS, name)) {
      refuse(`${name} is no mask: there are ${Object.keys(MASKS).join(", ")}`);
    }
    return this.mask(name);
  }
  mask(name) {
    const { fields } = MASKS[name];
    const given = {};
    if (!this.accept("(")) refuse(`${name} is a class: write ${name}(${fields.join(", ")})`);
    for (let i = 0; !this.accept(")"); i++) {
      if (i) { this.expect(","); if (this.accept(")")) break; }
      let field = fields[i];
      if (this.kind === "name" && this.tokens[this.at + 1][1] === "=") { field = this.take(); this.take(); }
      if (!fields.includes(field)) refuse(`${name} takes (${fields.join(", ")})${field ? `, no ${field}` : ""}`);
      if (Object.hasOwn(given, field)) refuse(`${name}: ${field} is given twice`);
      given[field] = this.value();
    }
    return MASKS[name].make(given);
  }
  value() {
    if (this.accept("-")) return -this.integer();
    if (this.kind === "number") return this.integer();
    if (this.accept("[")) return this.list();
    if (this.kind === "name") {
      const name = this.take();
      if (name === "None") return null;
      if (name === "True" || name === "False") return name === "True";
      if (name === "lambda") return this.lambda();
      if (/^(jnp|np|numpy|jax\.numpy)\.(array|asarray)$/.test(name)) {
        this.expect("(");
        const value = this.value();
        this.expect(")");
        return value;
      }
      refuse(`${name} is not known here: write numbers, or lists of them`);
    }
    return refuse(`expected a value before ${this.where()}`);
  }
  integer() {
    if (this.kind !== "number") refuse(`expected a whole number before ${this.where()}`);
    const value = Number(this.take());
    return value <= LARGEST ? value : refuse(`${value} does not fit int32`);
  }
  list() {
    const values = [];
    while (!this.accept("]")) {
      if (values.length) { this.expect(","); if (this.accept("]")) break; }
      values.push(this.value());
    }
    return values;
  }

  /* A function of positions: lambda q, k: (q - k) % 2 == 0 */
  lambda() {
    const names = [this.take()];
    if (!this.accept(",")) refuse("a Predicate asks a function of two: lambda q, k: ...");
    names.push(this.take());
    this.expect(":");
    this.names = names;
    return this.comparison();
  }
  comparison() {
    const left = this.chain(0);
    if (!/^([<>]=?|[=!]=)$/.test(this.next)) return left;
    const node = made(this.take(), left, this.chain(0));
    if (/^([<>]=?|[=!]=)$/.test(this.next)) refuse("compare two at a time, in brackets: (0 <= q) & (q < 8)");
    return node;
  }
  chain(level) {
    const levels = [["|"], ["&"], ["+", "-"], ["*", "//", "%"]];
    if (level === levels.length) return this.factor();
    let left = this.chain(level + 1);
    while (this.kind === "sign" && levels[level].includes(this.next)) {
      left = made(this.take(), left, this.chain(level + 1));
    }
    return left;
  }
  factor() {
    if (this.accept("-")) return made("-", number(0), this.factor());
    if (this.accept("~")) return made("~", this.factor());
    if (this.accept("(")) { const node = this.comparison(); this.expect(")"); return node; }
    if (this.kind === "number") return number(this.integer());
    if (this.kind !== "name") refuse(`expected q, k or a number before ${this.where()}`);
    const name = this.take();
    if (/^(jnp\.|jax\.numpy\.)?abs$/.test(name)) {
      this.expect("(");
      const node = this.comparison();
      this.expect(")");
      return made("abs", node);
    }
    const side = this.names.indexOf(name);
    if (side < 0) refuse(`${name} is not known here: a function reads ${this.names.join(", ")}, numbers and abs`);
    return { op: "qk"[side], of: [], side: "qk"[side], bool: false };
  }
}

const number = (value) => ({ op: "number", value, of: [], side: "", bool: false });

/** Return the node of an operation, once its operands are known to fit. */
function made(op, ...of) {
  const logic = ["&", "|", "~"].includes(op);
  const compares = /^([<>]=?|[=!]=)$/.test(op);
  for (const node of of) {
    if (node.bool !== logic) {
      refuse(logic ? `${op} joins comparisons: put them in brackets, (q >= k) ${op === "~" ? "&" : op} (k > 2)`
        : `${op} takes numbers, not the result of a comparison`);
    }
  }
  if (["//", "%"].includes(op) && !(of[1].op === "number" && of[1].value > 0)) {
    refuse(`${op} takes a number of 1 or more on its right`);
  }
  const side = [...new Set(of.map((node) => node.side).join(""))].sort().join("");
  const node = { op, of, side, bool: logic || compares };
  if (bounds(node, { q: [0, SIZE - 1], k: [0, SIZE - 1] }).some((x) => Math.abs(x) > 2 ** 30)) {
    refuse(`the result of ${op} may leave the integers of 32 bits`);
  }
  return node;
}

const floorMod = (x, y) => ((x % y) + y) % y;

/** Compute a node of a Predicate for one query and one key. */
function compute(node, q, k) {
  const [x, y] = node.of.map((one) => compute(one, q, k));
  switch (node.op) {
    case "q": return q;
    case "k": return k;
    case "number": return node.value;
    case "+": return x + y;
    case "-": return x - y;
    case "*": return x * y;
    case "//": return Math.floor(x / y);
    case "%": return floorMod(x, y);
    case "abs": return Math.abs(x);
    case "&": return x && y;
    case "|": return x || y;
    case "~": return !x;
    default: return compare(node.op, x, y);
  }
}

function compare(op, x, y) {
  return { "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "==": x === y, "!=": x !== y }[op];
}

/* ---- What is known of a tile: interval arithmetic, as in transformer_jax/kernels/program.py ----- */

/** Return the lowest and the highest result where q and k each lie in a range. Truths are 0 and 1.
 * `exact(node)`, where given, returns the range of what reads one side alone. */
function bounds(node, ranges, exact = null) {
  if (node.op === "number") return [node.value, node.value];
  if (exact && node.side.length === 1) return exact(node);
  if (node.op === "q" || node.op === "k") return ranges[node.op];
  const [x, y] = node.of.map((one) => bounds(one, ranges, exact));
  const both = (f) => [f(x[0], y[0]), f(x[1], y[1])];
  switch (node.op) {
    case "+": return both((a, b) => a + b);
    case "-": return [x[0] - y[1], x[1] - y[0]];
    case "*": {
      const corners = x.flatMap((a) => y.map((b) => a * b));
      return [Math.min(...corners), Math.max(...corners)];
    }
    case "//": return floorDivided(x, y[0]);
    case "%": return wrapped(remainder(x, y[0]), y[0]);
    case "abs": return [Math.max(x[0], -x[1]), Math.max(x[1], -x[0])];
    case "&": return both(Math.min);
    case "|": return both(Math.max);
    case "~": return [1 - x[1], 1 - x[0]];
    default: return comparison(node.op, x, y);
  }
}

function comparison(op, x, y) {
  const meet = x[0] <= y[1] && y[0] <= x[1];
  const same = x[0] === x[1] && y[0] === y[1] && x[0] === y[0];
  const found = {
    "==": [same, meet], "!=": [!meet, !same],
    "<": [x[1] < y[0], x[0] < y[1]], "<=": [x[1] <= y[0], x[0] <= y[1]],
    ">": [x[0] > y[1], x[1] > y[0]], ">=": [x[0] >= y[1], x[1] >= y[0]],
  }[op];
  return found.map(Number);
}

/** Bound x - trunc(x / y) y, the remainder that has the sign of x. */
function remainder(x, y) {
  const parts = x.map((a) => Math.trunc(a / y));
  if (parts[0] === parts[1]) return x.map((a, i) => a - parts[i] * y);
  return [x[0] >= 0 ? 0 : Math.max(x[0], 1 - y), x[1] <= 0 ? 0 : Math.min(x[1], y - 1)];
}

/** Bound what jax.numpy makes of such a remainder: y is added where it is below 0. */
function wrapped(rest, y) {
  if (rest[0] >= 0) return rest;
  if (rest[1] < 0) return rest.map((a) => a + y);
  return [Math.min(rest[0], rest[0] + y), Math.max(rest[1], rest[1] + y)];
}

/** Bound floor(x / y) as jax.numpy computes it: 1 less than towards zero, where signs and rest ask. */
function floorDivided(x, y) {
  const [low, high] = x.map((a) => Math.trunc(a / y));
  const rest = remainder(x, y);
  const differ = comparison("!=", x.map(Math.sign), [1, 1]);
  const inexact = comparison("!=", rest, [0, 0]);
  const every = differ[0] && inexact[0];
  const some = differ[1] && inexact[1];
  return [low - (some ? 1 : 0), high - (every ? 1 : 0)];
}

/** Return [lowest, highest] of f over the positions first .. last - 1. */
function rangeOf(f, first, last) {
  let low = Infinity, high = -Infinity;
  for (let i = first; i < last; i++) {
    const value = Number(f(i));
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/* ---- The masks of transformer_jax.attention.masks ---------------------------------------------- */

function arrayField(mask, field, value, wanted, kind) {
  const rows = Array.isArray(value) ? value : refuse(`${mask}: ${field} must be an array ${wanted}`);
  const flat = rows.flat(Infinity);
  if (!flat.length || !flat.every((x) => typeof x === kind)) {
    refuse(`${mask}: ${field} must be an array ${wanted}`);
  }
  return rows;
}

function oneRow(mask, field, value, wanted, kind) {
  const rows = arrayField(mask, field, value, wanted, kind);
  if (rows.some((row) => !Array.isArray(row) || row.some(Array.isArray))) {
    refuse(`${mask}: ${field} must be an array ${wanted}: two pairs of brackets`);
  }
  if (rows.length !== 1) refuse(`${mask}: ${field} has ${rows.length} rows; the page draws a batch of 1`);
  return rows[0];
}

const python = (value) => (Array.isArray(value) ? `[${value.map(python).join(", ")}]`
  : value === null ? "None" : value === true ? "True" : value === false ? "False" : String(value));
const jnpArray = (value) => `jnp.array(${python(value)})`;
const inside = (row, i) => i < row.length;
const nearest = (row, i) => row[Math.min(i, row.length - 1)];
const both = (...ranges) => [Math.min(...ranges.map((r) => r[0])), Math.min(...ranges.map((r) => r[1]))];

/* Of each: `sees` one pair; `bound` a tile, [every, some] as 0 or 1, where `at` has its ranges. */
const MASKS = {
  Everything: {
    fields: [],
    make: () => ({ kind: "Everything" }),
    sees: () => true,
    bound: () => [1, 1],
    text: () => "Everything()",
    says: "true of every pair",
  },
  Causal: {
    fields: [],
    make: () => ({ kind: "Causal" }),
    sees: (_, q, k) => k <= q,
    bound: (_, at) => comparison("<=", at.k, at.q),
    text: () => "Causal()",
    says: "k <= q",
  },
  Window: {
    fields: ["left", "right"],
    make({ left, right = null }) {
      if (left === undefined) refuse("Window: left is missing: write Window(4)");
      if (left === null && right === null) refuse("Window(None, None) has no bound: pass left or right");
      for (const [name, value] of [["left", left], ["right", right]]) {
        if (value !== null && !(Number.isInteger(value) && value >= 0)) {
          refuse(`Window: ${name} is ${python(value)}: must be an integer of at least 0`);
        }
      }
      return { kind: "Window", left, right };
    },
    sees: ({ left, right }, q, k) => (left === null || q - k < left) && (right === null || k - q < right),
    bound({ left, right }, at) {
      if (left !== null && right !== null && left + right < 2) return [0, 0];
      const apart = [at.q[0] - at.k[1], at.q[1] - at.k[0]];
      const sides = left === null ? [] : [comparison("<=", apart, [left - 1, left - 1])];
      if (right !== null) sides.push(comparison(">=", apart, [1 - right, 1 - right]));
      return both(...sides);
    },
    text: ({ left, right }) => `Window(${python(left)}${right === null ? "" : `, ${right}`})`,
    says: "q - k < left, and k - q < right where given",
  },
  Prefix: {
    fields: ["lengths"],
    make({ lengths }) {
      const row = arrayField("Prefix", "lengths", lengths, "i32[B], such as [3]", "number");
      if (row.some(Array.isArray)) refuse("Prefix: lengths must be an array i32[B]: one pair of brackets");
      if (row.length !== 1) refuse(`Prefix: lengths has ${row.length} rows; the page draws a batch of 1`);
      return { kind: "Prefix", lengths: row };
    },
    sees: ({ lengths }, _, k) => k < lengths[0],
    bound: ({ lengths }, at) => at.keys((k) => k < lengths[0]),
    text: ({ lengths }) => `Prefix(${jnpArray(lengths)})`,
    says: "k < length: the first keys",
  },
  Segments: {
    fields: ["q_ids", "k_ids"],
    make({ q_ids, k_ids = null }) {
      const wanted = "i32[B, T], such as [[1, 1, 2]]";
      return {
        kind: "Segments",
        q: oneRow("Segments", "q_ids", q_ids, wanted, "number"),
        k: k_ids === null ? null : oneRow("Segments", "k_ids", k_ids, wanted, "number"),
      };
    },
    sees: (mask, q, k) => inside(mask.q, q) && inside(mask.k ?? mask.q, k) && mask.q[q] === (mask.k ?? mask.q)[k],
    bound(mask, at) {
      const keys = mask.k ?? mask.q;
      const same = comparison("==", at.queries((q) => nearest(mask.q, q)), at.keys((k) => nearest(keys, k)));
      return both(same, at.queries((q) => inside(mask.q, q)), at.keys((k) => inside(keys, k)));
    },
    text: (mask) => `Segments(${jnpArray([mask.q])}${mask.k ? `, ${jnpArray([mask.k])}` : ""})`,
    says: "the ids of q and k are equal: one document",
  },
  Padding: {
    fields: ["valid"],
    make: ({ valid }) => ({
      kind: "Padding",
      valid: oneRow("Padding", "valid", valid, "bool[B, S], such as [[True, False]]", "boolean"),
    }),
    sees: ({ valid }, _, k) => inside(valid, k) && valid[k],
    bound: ({ valid }, at) => both(at.keys((k) => nearest(valid, k)), at.keys((k) => inside(valid, k))),
    text: ({ valid }) => `Padding(${jnpArray([valid])})`,
    says: "valid[k]: the key is no padding",
  },
  Dense: {
    fields: ["array"],
    make({ array }) {
      const rows = arrayField("Dense", "array", array, "bool[T, S], such as [[True, False], [True, True]]", "boolean");
      if (rows.some((row) => !Array.isArray(row) || row.length !== rows[0].length || row.some(Array.isArray))) {
        refuse("Dense: array must be an array bool[T, S], with rows of one length");
      }
      return { kind: "Dense", array: rows };
    },
    sees: ({ array }, q, k) => q < array.length && k < array[0].length && array[q][k],
    bound(mask, at) {
      let every = 1, some = 0;
      at.pairs((q, k) => { if (MASKS.Dense.sees(mask, q, k)) some = 1; else every = 0; });
      return [every, some];
    },
    text: ({ array }) => `Dense(${jnpArray(array)})`,
    says: "array[q, k]",
  },
  Predicate: {
    fields: ["fn"],
    make({ fn }) {
      if (!fn || !fn.op) refuse("Predicate: fn must be a function: lambda q, k: (q - k) % 2 == 0");
      if (!fn.bool) refuse("Predicate: fn returned int32: must be bool");
      return { kind: "Predicate", fn };
    },
    sees: ({ fn }, q, k) => compute(fn, q, k),
    bound({ fn }, at) {
      const exact = (node) => (node.side === "q" ? at.queries((q) => compute(node, q, 0)) : at.keys((k) => compute(node, 0, k)));
      return bounds(fn, at, exact);
    },
    text: ({ fn }) => `Predicate(lambda q, k: ${functionText(fn)})`,
    says: "the function of q and k returns True",
  },
};

function functionText(node, within = 0) {
  const levels = { "|": 2, "&": 3, "+": 4, "-": 4, "*": 5, "//": 5, "%": 5 };
  if (node.op === "number") return String(node.value);
  if (node.op === "q" || node.op === "k") return node.op;
  if (node.op === "abs") return `abs(${functionText(node.of[0])})`;
  if (node.op === "~") return `~${functionText(node.of[0], 6)}`;
  const level = levels[node.op] ?? 1;
  const [x, y] = node.of;
  const text = `${functionText(x, level === 1 ? 2 : level)} ${node.op} ${functionText(y, level + 1)}`;
  return level < within ? `(${text})` : text;
}

const parseMask = (text) => new Parser(text).whole();

/** Return the expression as the library takes it; `from transformer_jax import ...` has its names. */
function maskText(mask, within = 0) {
  if (mask.kind === "Not") return `~${maskText(mask.mask, 2)}`;
  if (mask.kind !== "And" && mask.kind !== "Or") return MASKS[mask.kind].text(mask);
  const level = mask.kind === "And" ? 1 : 0;
  const text = `${maskText(mask.left, level)} ${level ? "&" : "|"} ${maskText(mask.right, level + 1)}`;
  return level < within ? `(${text})` : text;
}

function sees(mask, q, k) {
  switch (mask.kind) {
    case "And": return sees(mask.left, q, k) && sees(mask.right, q, k);
    case "Or": return sees(mask.left, q, k) || sees(mask.right, q, k);
    case "Not": return !sees(mask.mask, q, k);
    default: return MASKS[mask.kind].sees(mask, q, k);
  }
}

function boundTile(mask, at) {
  switch (mask.kind) {
    case "And": return both(boundTile(mask.left, at), boundTile(mask.right, at));
    case "Or": {
      const sides = [boundTile(mask.left, at), boundTile(mask.right, at)];
      return [0, 1].map((i) => Math.max(sides[0][i], sides[1][i]));
    }
    case "Not": { const [every, some] = boundTile(mask.mask, at); return [1 - some, 1 - every]; }
    default: return MASKS[mask.kind].bound(mask, at);
  }
}

const leaves = (mask) => (mask.kind === "Not" ? leaves(mask.mask)
  : mask.left && mask.right && (mask.kind === "And" || mask.kind === "Or")
    ? [...leaves(mask.left), ...leaves(mask.right)] : [mask]);

/** Return bool[T][T]: whether query q may attend to key k. */
const maskMatrix = (mask, T) => Array.from({ length: T }, (_, q) => Array.from({ length: T }, (_, k) => Boolean(sees(mask, q, k))));

const SKIPPED = 0, PARTIAL = 1, FULL = 2;

/** Return the classes of the tiles, [nQ][nK], as Mask.block_plan has them. */
function tileClasses(mask, T, blockQ, blockK) {
  const tiles = (block) => Array.from({ length: Math.ceil(T / block) }, (_, i) => [i * block, Math.min(T, (i + 1) * block)]);
  return tiles(blockQ).map(([q0, q1]) => tiles(blockK).map(([k0, k1]) => {
    const [every, some] = boundTile(mask, {
      q: [q0, q1 - 1],
      k: [k0, k1 - 1],
      queries: (f) => rangeOf(f, q0, q1),
      keys: (f) => rangeOf(f, k0, k1),
      pairs: (f) => { for (let q = q0; q < q1; q++) for (let k = k0; k < k1; k++) f(q, k); },
    });
    return !some ? SKIPPED : every && k1 - k0 === blockK ? FULL : PARTIAL;
  }));
}

/* ---- The ring: slot p % S, as in transformer_jax/cache/kv_cache.py ------------------------------ */

/** Return the slot of a position; the first `sinks` positions keep theirs. */
const slotOf = (position, capacity, sinks) => (position < sinks ? position : sinks + ((position - sinks) % (capacity - sinks)));

/** Return the cache after `length` tokens: i32[S], -1 an empty slot; and what the last write replaced. */
function cacheAfter(length, capacity, sinks) {
  const positions = Array(capacity).fill(-1);
  let written = -1, replaced = -1;
  for (let p = 0; p < length; p++) {
    written = slotOf(p, capacity, sinks);
    replaced = positions[written];
    positions[written] = p;
  }
  return { positions, written, replaced };
}

/** Return whether a query sees a position: Causal() & (Window(window) | Prefix(sinks)). */
const cacheSees = (query, position, window, sinks) => position >= 0 && position <= query
  && (window === null || query - position < window || position < sinks);

/* ---- The decoder: RMSNorm, a bias for each distance, GELU, tied embeddings ------------------------ */

/** Turn the integers of model.js into Float64Arrays. */
function loadModel(file) {
  const weights = {};
  for (const [name, { shape, values }] of Object.entries(file.weights)) {
    weights[name] = { shape, values: Float64Array.from(values, (x) => x / file.scale) };
  }
  return { config: file.config, words: file.words, examples: file.examples, subject: file.subject, weights };
}

/** Return x [T, I] times W [I, O], both flat. */
function product(x, W, T, I, O) {
  const y = new Float64Array(T * O);
  for (let t = 0; t < T; t++) {
    for (let i = 0; i < I; i++) {
      const a = x[t * I + i];
      for (let o = 0; o < O; o++) y[t * O + o] += a * W[i * O + o];
    }
  }
  return y;
}

function rmsNorm(x, scale, T, D, eps) {
  const y = new Float64Array(T * D);
  for (let t = 0; t < T; t++) {
    let square = 0;
    for (let i = 0; i < D; i++) square += x[t * D + i] ** 2;
    const factor = 1 / Math.sqrt(square / D + eps);
    for (let i = 0; i < D; i++) y[t * D + i] = x[t * D + i] * factor * scale[i];
  }
  return y;
}

const gelu = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

function softmax(values) {
  const most = Math.max(...values);
  const parts = values.map((x) => Math.exp(x - most));
  const sum = parts.reduce((a, b) => a + b, 0);
  return parts.map((x) => x / sum);
}

/** Return {weights [L][N][T][T], logits [T][V], probabilities [T][V]} of the ids of words. */
function forward(model, ids) {
  const { d_model: D, num_layers: L, num_heads: N, head_dim: H, d_ff: F, norm_eps: eps } = model.config;
  const T = ids.length, V = model.words.length;
  const weight = (name) => model.weights[name].values;
  const table = weight("embed/tokens"), bias = weight("decoder/relative_bias"), factor = 1 / Math.sqrt(H);
  let x = new Float64Array(T * D);
  ids.forEach((id, t) => x.set(table.subarray(id * D, (id + 1) * D), t * D));
  const add = (y) => { x = x.map((value, i) => value + y[i]); };
  const weights = [];
  for (let l = 0; l < L; l++) {
    const at = (name) => weight(`decoder/block_${l}/${name}`);
    let y = rmsNorm(x, at("norm_attention/scale"), T, D, eps);
    const q = product(y, at("attention/query/kernel"), T, D, N * H);
    const k = product(y, at("attention/key/kernel"), T, D, N * H);
    const v = product(y, at("attention/value/kernel"), T, D, N * H);
    const heads = new Float64Array(T * N * H);
    weights.push(Array.from({ length: N }, (_, n) => Array.from({ length: T }, (_, t) => {
      const scores = Array.from({ length: t + 1 }, (_, s) => { // causal
        let score = 0;
        for (let h = 0; h < H; h++) score += q[(t * N + n) * H + h] * k[(s * N + n) * H + h];
        return score * factor + bias[(t - s) * N + n];
      });
      const row = softmax(scores);
      row.forEach((w, s) => { for (let h = 0; h < H; h++) heads[(t * N + n) * H + h] += w * v[(s * N + n) * H + h]; });
      return [...row, ...Array(T - t - 1).fill(0)];
    })));
    add(product(heads, at("attention/out/kernel"), T, N * H, D));
    y = rmsNorm(x, at("norm_feed_forward/scale"), T, D, eps);
    add(product(product(y, at("feed_forward/up/kernel"), T, D, F).map(gelu), at("feed_forward/down/kernel"), T, F, D));
  }
  const last = rmsNorm(x, weight("decoder/norm/scale"), T, D, eps);
  const logits = Array.from({ length: T }, (_, t) => Array.from({ length: V }, (_, id) => {
    let sum = 0;
    for (let i = 0; i < D; i++) sum += last[t * D + i] * table[id * D + i];
    return sum;
  }));
  return { weights, logits, probabilities: logits.map(softmax) };
}

/** Return the ids of a sentence's words; full stops and question marks may touch a word. */
function readSentence(model, text) {
  const words = text.replace(/([.?])/g, " $1 ").split(/\s+/).filter(Boolean);
  if (!words.length) refuse("write a sentence of the words below");
  const lower = model.words.map((word) => word.toLowerCase());
  const ids = words.map((word) => lower.indexOf(word.toLowerCase()));
  const unknown = words.filter((_, i) => ids[i] < 0);
  if (unknown.length) refuse(`“${unknown[0]}” is not one of the ${model.words.length} words of this model`);
  const most = model.config.max_len;
  if (ids.length > most) refuse(`${ids.length} words: the model was trained on ${most} at most`);
  return ids;
}

const arithmetic = { parseMask, maskText, maskMatrix, tileClasses, cacheAfter, cacheSees, loadModel, forward, readSentence };
if (typeof module !== "undefined") module.exports = arithmetic;
if (typeof document === "undefined") return;

/* ---- The page ----------------------------------------------------------------------------------- */

const $ = (id) => document.getElementById(id);
const on = (id, event, act) => $(id).addEventListener(event, act);

/** Make an element: properties that begin with "data-", "aria-" or "role" are attributes. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(data-|aria-|role|style)/.test(name)) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Show what `act` refuses as one line, and mark the field; return whether it went well. */
function guarded(field, line, act) {
  for (const marked of document.querySelectorAll(`#play [aria-describedby="${line}"]`)) marked.removeAttribute("aria-invalid");
  try {
    act();
    $(line).textContent = "";
    return true;
  } catch (wrong) {
    if (!(wrong instanceof Wrong)) throw wrong;
    $(line).textContent = wrong.message;
    $(wrong.field ?? field).setAttribute("aria-invalid", "true");
    return false;
  }
}

/** Make one of an element's children at a time reachable by Tab, and move by the arrow keys. */
function rove(parent, columns) {
  const items = () => [...parent.querySelectorAll("[data-item]")];
  parent.addEventListener("focusin", ({ target }) => {
    if (!target.hasAttribute("data-item")) return;
    for (const item of parent.querySelectorAll('[tabindex="0"]')) item.tabIndex = -1;
    target.tabIndex = 0;
  });
  parent.addEventListener("keydown", (event) => {
    const all = items(), at = all.indexOf(document.activeElement), wide = columns();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide };
    let to = at + (steps[event.key] ?? 0);
    const row = wide === 1 ? 0 : at - (at % wide);
    if (event.key === "Home") to = row;
    else if (event.key === "End") to = (wide === 1 ? all.length : row + wide) - 1;
    else if (!(event.key in steps)) return;
    else if (Math.abs(steps[event.key]) === 1 && wide > 1 && (to < row || to >= row + wide)) to = at;
    if (at < 0) return;
    event.preventDefault();
    (all[to] ?? all[at]).focus();
  });
}

const facts = (id, rows) => $(id).replaceChildren(...rows.flatMap(([name, value]) => [
  element("dt", { textContent: name }), element("dd", { textContent: value })]));
const legend = (id, rows) => $(id).replaceChildren(...rows.map(([kind, text]) => element("span", {},
  element("i", { className: kind, "aria-hidden": "true" }), text)));
const percent = (part) => (part > 0 && part < 0.001 ? "< 0.1 %" : `${(100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0)} %`);
const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

/* ---- A mask ------------------------------------------------------------------------------------- */

const half = (T) => Math.ceil(T / 2);
const documents = (T) => Array.from({ length: T }, (_, i) => (i < Math.round(T * 0.3) ? 0 : i < Math.round(T * 0.7) ? 1 : 2));
const EXAMPLES = {
  "causal": () => "Causal()",
  "sliding window": () => "Causal() & Window(8)",
  "window and sinks": () => "Causal() & (Window(4) | Prefix(jnp.array([2])))",
  "prefix": (T) => `Causal() | Prefix(${jnpArray([Math.ceil(T / 3)])})`,
  "packed documents": (T) => `Causal() & Segments(${jnpArray([documents(T)])})`,
  "padding": (T) => `Padding(${jnpArray([Array.from({ length: T }, (_, i) => i < T - Math.ceil(T / 4))])})`,
  "band": () => "Window(3, 3)",
  "every second": () => "Causal() & Predicate(lambda q, k: (q - k) % 2 == 0)",
  "chunks": () => "Predicate(lambda q, k: q // 4 == k // 4)",
};
/* What the form asks for, and the mask that it makes of the answers. */
const FORMS = {
  Causal: [[], () => "Causal()"],
  Window: [[["left", "4"], ["right", ""]], (T, left, right) => `Window(${left.trim() || "None"}${right.trim() ? `, ${right}` : ""})`],
  Prefix: [[["length", "3"]], (T, length) => `Prefix([${length}])`],
  Segments: [[["lengths of documents", "5 6 5"]], (T, lengths) => `Segments([[${
    lengths.trim().split(/[\s,]+/).flatMap((n, i) => Array(wholeNumber("length of a document", n, 1, SIZE)).fill(i)).join(", ")}]])`],
  Padding: [[["valid keys", "12"]], (T, n) => `Padding([[${
    Array.from({ length: T }, (_, i) => (i < wholeNumber("valid keys", n, 0, SIZE) ? "True" : "False")).join(", ")}]])`],
  Predicate: [[["of q and k", "(q - k) % 2 == 0"]], (T, body) => `Predicate(lambda q, k: ${body})`],
  Everything: [[], () => "Everything()"],
};
const CLASSES = ["skipped", "masked", "whole"];
const TILE_WORDS = ["skipped", "computed masked", "computed whole"];

function wholeNumber(name, text, least, most, field = null) {
  const value = Number(text);
  if (String(text).trim() === "" || !Number.isInteger(value) || value < least || value > most) {
    refuse(`${name} is “${String(text).trim()}”: must be a whole number from ${least} to ${most}`, field);
  }
  return value;
}

function startMasks() {
  const state = { mask: null, T: 16, past: [], at: [0, 0] };
  for (const id of ["mask-block-q", "mask-block-k"]) {
    $(id).append(...[1, 2, 3, 4, 6, 8, 12, 16].map((n) => element("option", { value: n, textContent: n, selected: n === 4 })));
  }
  $("mask-kind").append(...Object.keys(FORMS).map((name) => element("option", { textContent: name })));
  for (const [name, text] of Object.entries(EXAMPLES)) {
    const button = element("button", { type: "button", textContent: name });
    button.addEventListener("click", () => write(text(state.T)));
    $("mask-examples").append(button);
  }

  function write(text) {
    if ($("mask-text").value !== text) state.past.push($("mask-text").value);
    $("mask-text").value = text;
    draw();
  }

  function askFields() {
    const [fields] = FORMS[$("mask-kind").value];
    $("mask-fields").replaceChildren(...fields.map(([name, value], i) => element("label", {}, `${name} `,
      element("input", { id: `mask-field-${i}`, type: "text", value, "aria-describedby": "mask-wrong", className: name.startsWith("of q") ? "code" : "code short", spellcheck: false, autocapitalize: "off" }))));
  }

  function add() {
    let before = null;
    const now = () => { before = $("mask-text").value.trim() ? parseMask($("mask-text").value) : null; };
    if (!guarded("mask-text", "mask-wrong", now)) return;
    const inputs = [...$("mask-fields").querySelectorAll("input")];
    guarded(inputs.length ? "mask-field-0" : "mask-text", "mask-wrong", () => {
      const [, text] = FORMS[$("mask-kind").value];
      const right = parseMask(text(state.T, ...inputs.map((input) => input.value)));
      const [join, not] = $("mask-join").value.split(" ");
      const other = not ? { kind: "Not", mask: right } : right;
      write(maskText(before ? { kind: join === "&" ? "And" : "Or", left: before, right: other } : other));
    });
  }

  function draw() {
    state.T = Number($("mask-length").value);
    $("mask-length-now").textContent = state.T;
    const fine = guarded("mask-text", "mask-wrong", () => { state.mask = parseMask($("mask-text").value); });
    $("mask-matrix").classList.toggle("old", !fine);
    $("mask-copy").disabled = !fine;
    if (!state.mask) return;
    const { mask, T } = state;
    const blockQ = Number($("mask-block-q").value), blockK = Number($("mask-block-k").value);
    const matrix = maskMatrix(mask, T), classes = tileClasses(mask, T, blockQ, blockK);
    state.classOf = (q, k) => classes[Math.floor(q / blockQ)][Math.floor(k / blockK)];
    state.tileOf = (q, k) => [Math.floor(q / blockQ), Math.floor(k / blockK)];
    state.matrix = matrix;
    $("mask-python").textContent = maskText(mask);
    state.at = state.at.map((i) => Math.min(i, T - 1));

    const every = T <= 20 ? 1 : T <= 32 ? 4 : 8;
    const name = (i) => (i % every ? "" : i);
    const rows = [`<div role="row" class="heads-row"><span role="columnheader" class="corner"><span class="hidden">query</span></span>${
      matrix.map((_, k) => `<span role="columnheader" class="axis">${name(k)}</span>`).join("")}</div>`];
    matrix.forEach((row, q) => rows.push(`<div role="row"><span role="rowheader" class="axis">${name(q)}</span>${row.map((visible, k) => {
      const edges = `${q % blockQ ? "" : " top"}${k % blockK ? "" : " left"}${q === T - 1 ? " bottom" : ""}${k === T - 1 ? " right" : ""}`;
      const focus = q === state.at[0] && k === state.at[1] ? 0 : -1;
      return `<span role="gridcell" data-item tabindex="${focus}" class="cell ${CLASSES[state.classOf(q, k)]}${visible ? " visible" : ""}${edges}" aria-label="query ${q}, key ${k}: ${visible ? "visible" : "hidden"}"></span>`;
    }).join("")}</div>`));
    $("mask-matrix").innerHTML = rows.join("");
    $("mask-matrix").style.setProperty("--tokens", T);

    const pairs = matrix.flat().filter(Boolean).length;
    const tiles = [0, 1, 2].map((kind) => classes.flat().filter((c) => c === kind).length);
    const computed = matrix.flatMap((row, q) => row.filter((_, k) => state.classOf(q, k) !== SKIPPED)).length;
    const empty = matrix.filter((row) => !row.some(Boolean)).length;
    const all = classes.flat().length;
    facts("mask-facts", [
      ["Visible pairs", `${pairs} of ${T * T}, ${percent(pairs / T ** 2)}`],
      ["Tiles visited", `${all - tiles[0]} of ${all}, ${percent((all - tiles[0]) / all)}`],
      ["Pairs computed", `${computed} of ${T * T}, ${percent(computed / T ** 2)} of dense attention`],
      ["Fully masked rows", empty ? `${empty}: their output is 0` : "none"],
    ]);
    legend("mask-legend", [
      ["cell whole visible", `${count(tiles[2], "tile")} computed whole`],
      ["cell masked visible", `${count(tiles[1], "tile")} computed masked`],
      ["cell masked", "hidden there"],
      ["cell skipped", `${count(tiles[0], "tile")} skipped`],
    ]);
    tell(...state.at);
  }

  function tell(q, k) {
    state.at = [q, k];
    const visible = state.matrix[q][k];
    const short = (text, kind) => (text.length > 24 ? kind : text);
    const parts = leaves(state.mask).map((leaf) => `${short(maskText(leaf), leaf.kind)} is ${sees(leaf, q, k) ? "True" : "False"}`);
    $("mask-cell").textContent = `Query ${q}, key ${k}: ${visible ? "visible" : "hidden"}; ${parts.join(", ")}. Tile (${
      state.tileOf(q, k).join(", ")}) is ${TILE_WORDS[state.classOf(q, k)]}.`;
  }

  function tellOf({ target }) {
    if (!target.matches?.("[data-item]")) return;
    const cells = [...$("mask-matrix").querySelectorAll("[data-item]")], at = cells.indexOf(target);
    tell(Math.floor(at / state.T), at % state.T);
  }

  on("mask-text", "input", draw);
  for (const id of ["mask-length", "mask-block-q", "mask-block-k"]) on(id, "input", draw);
  on("mask-kind", "change", askFields);
  on("mask-add", "click", add);
  on("mask-fields", "keydown", (event) => { if (event.key === "Enter") add(); });
  on("mask-not", "click", () => guarded("mask-text", "mask-wrong", () => {
    const mask = parseMask($("mask-text").value);
    write(maskText(mask.kind === "Not" ? mask.mask : { kind: "Not", mask }));
  }));
  on("mask-undo", "click", () => { if (state.past.length) { $("mask-text").value = state.past.pop(); draw(); } });
  on("mask-copy", "click", () => copy($("mask-python"), $("mask-copy")));
  on("mask-matrix", "pointerover", tellOf);
  on("mask-matrix", "focusin", tellOf);
  rove($("mask-matrix"), () => state.T);
  askFields();
  draw();
}

/** Copy a text; where the browser does not let a page do so, select it. */
async function copy(from, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(from.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(from);
    button.textContent = "Selected: copy it";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

/* ---- A cache ------------------------------------------------------------------------------------ */

function startCache() {
  let running = null;

  function read() {
    const words = $("cache-text").value.split(/\s+/).filter(Boolean);
    if (!words.length) refuse("write a text of at least one word");
    if (words.length > SIZE) refuse(`${words.length} words: the page takes ${SIZE} at most`);
    const text = $("cache-window").value;
    if ($("cache-window").validity.badInput) refuse(`Window must be a whole number from 1 to ${SIZE}, or empty`, "cache-window");
    const window = text.trim() === "" ? null : wholeNumber("Window", text, 1, SIZE, "cache-window");
    const sinks = window === null ? 0 : wholeNumber("Sinks", $("cache-sinks").value, 0, 16, "cache-sinks");
    const spare = wholeNumber("Spare slots", $("cache-spare").value, 0, 16, "cache-spare");
    return { words, window, sinks, capacity: (window === null ? words.length : window + sinks) + spare };
  }

  function draw() {
    guarded("cache-text", "cache-wrong", () => show(read()));
  }

  function show({ words, window, sinks, capacity }) {
    const slider = $("cache-step");
    slider.max = words.length;
    const length = Math.min(Number(slider.value), words.length), query = length - 1;
    slider.value = length;
    $("cache-step-now").textContent = `${length} of ${words.length}`;
    $("cache-sinks").disabled = window === null;
    const { positions, written, replaced } = cacheAfter(length, capacity, sinks);
    const seen = positions.map((p) => cacheSees(query, p, window, sinks));
    const held = new Set(positions);

    $("cache-tokens").replaceChildren(...words.map((word, p) => {
      const kind = p === query ? "query seen" : p > query ? "later" : cacheSees(query, p, window, sinks) ? "seen" : held.has(p) ? "held" : "gone";
      const says = { "query seen": "the query", later: "not read yet", seen: "seen", held: "held, not seen", gone: "overwritten" }[kind];
      return element("li", { className: `token ${kind}`, "aria-label": `position ${p}, ${word}: ${says}` },
        element("span", { textContent: word }), element("small", { textContent: p }));
    }));
    $("cache-slots").replaceChildren(...positions.map((p, slot) => {
      const kind = `${p < 0 ? "empty" : seen[slot] ? "seen" : "held"}${slot === written ? " written" : ""}${slot < sinks ? " sink" : ""}`;
      const made = element("li", { className: `slot ${kind}`, "data-position": p },
        element("small", { textContent: `slot ${slot}${slot < sinks ? ", sink" : ""}` }),
        element("b", { textContent: p < 0 ? "empty" : words[p] }),
        element("span", { textContent: p < 0 ? "position -1" : `position ${p}` }));
      if (slot === written && replaced >= 0) made.append(element("s", { textContent: `${words[replaced]}, ${replaced}`, "aria-label": `overwrote position ${replaced}` }));
      return made;
    }));
    const ring = capacity - sinks;
    const rule = query < sinks ? `${query}, a sink` : sinks ? `${sinks} + (${query} − ${sinks}) mod ${ring} = ${written}` : `${query} mod ${ring} = ${written}`;
    $("cache-line").textContent = length
      ? `Position ${query}, “${words[query]}”, goes to slot ${rule}${replaced >= 0 ? `, where position ${replaced} was` : ""}. It sees ${count(seen.filter(Boolean).length, "key")}.`
      : "Nothing is read yet: every slot has position -1, which no query sees.";
    const keysAt = (q) => words.slice(0, q + 1).filter((_, p) => cacheSees(q, p, window, sinks)).length;
    const steps = Array.from({ length }, (_, q) => keysAt(q));
    const cached = steps.reduce((a, b) => a + b, 0);
    const again = steps.reduce((sum, keys, q) => sum + keys * (length - q), 0);
    facts("cache-facts", [
      ["Slots filled", `${positions.filter((p) => p >= 0).length} of ${capacity}`],
      ["Products of a query and a key", `${cached} so far; ${again} without a cache`],
    ]);
    legend("cache-legend", [["slot seen", "seen by the query"], ["slot held", "held, not seen"], ["slot seen written", "written now"], ["slot empty", "empty"]]);
    $("cache-python").textContent = `cache.init(batch=1, capacity=${capacity}, num_kv_heads=K, head_dim=H${sinks ? `, sinks=${sinks}` : ""})`;
    $("cache-back").disabled = $("cache-first").disabled = length === 0;
    $("cache-next").disabled = length === words.length;
    if (length === words.length) stop();
  }

  function move(to) { $("cache-step").value = to; draw(); }
  function stop() {
    clearInterval(running);
    running = null;
    $("cache-run").textContent = "Run";
    $("cache-run").setAttribute("aria-pressed", "false");
  }
  const at = () => Number($("cache-step").value);

  for (const id of ["cache-text", "cache-window", "cache-sinks", "cache-spare", "cache-step"]) on(id, "input", draw);
  on("cache-first", "click", () => { stop(); move(0); });
  on("cache-back", "click", () => { stop(); move(at() - 1); });
  on("cache-next", "click", () => { stop(); move(at() + 1); });
  on("cache-run", "click", () => {
    if (running) { stop(); return; }
    if (at() === Number($("cache-step").max)) move(0);
    $("cache-run").textContent = "Pause";
    $("cache-run").setAttribute("aria-pressed", "true");
    running = setInterval(() => move(at() + 1), 700);
  });
  draw();
}

/* ---- Attention ---------------------------------------------------------------------------------- */

/** Draw weights [T][T] as squares of 10 shades. */
function weightPicture(weights, query = null) {
  const T = weights.length, shades = Array.from({ length: 11 }, () => []);
  weights.forEach((row, q) => row.forEach((w, k) => { if (k <= q) shades[Math.round(10 * w)].push(`M${k} ${q}h1v1h-1z`); }));
  const paths = shades.map((d, i) => (d.length ? `<path d="${d.join("")}" fill-opacity="${Math.max(0.04, i / 10)}"/>` : ""));
  const row = query === null ? "" : `<rect class="row-mark" x="0" y="${query}" width="${query + 1}" height="1"/>`;
  return `<svg viewBox="-0.1 -0.1 ${T + 0.2} ${T + 0.2}" aria-hidden="true">${paths.join("")}${row}</svg>`;
}

function startAttention(model) {
  const { num_layers: L, num_heads: N } = model.config;
  const state = { ids: [], found: null, query: 0, pinned: 0, layer: L - 1, head: 0 };
  const words = () => state.ids.map((id) => model.words[id]);
  const examples = model.examples;

  for (const text of examples) {
    const button = element("button", { type: "button", textContent: `… ${text.split(" ").slice(-4).join(" ")}` });
    button.addEventListener("click", () => write(text));
    $("attention-examples").append(button);
  }
  for (const word of model.words) {
    const button = element("button", { type: "button", textContent: word });
    button.addEventListener("click", () => write(`${$("attention-text").value.trim()} ${word}`));
    $("attention-words").append(button);
  }
  for (let layer = 0; layer < L; layer++) {
    const row = element("div", { className: "head-row", role: "group", "aria-label": `Layer ${layer}` }, element("span", { textContent: `layer ${layer}` }));
    for (let head = 0; head < N; head++) {
      const input = element("input", { type: "radio", name: "attention-head", value: `${layer} ${head}`, checked: layer === state.layer && head === state.head });
      input.addEventListener("change", () => { state.layer = layer; state.head = head; show(); });
      row.append(element("label", {}, input, element("span", { className: "small-picture" }), element("small", { textContent: `head ${head}` }), element("span", { className: "hidden", textContent: `of layer ${layer}` })));
    }
    $("attention-heads").append(row);
  }

  function write(text) { $("attention-text").value = text.trim(); compute(); }

  function compute() {
    const fine = guarded("attention-text", "attention-wrong", () => {
      const ids = readSentence(model, $("attention-text").value);
      const wasLast = state.pinned === state.ids.length - 1 || !state.ids.length;
      state.ids = ids;
      state.found = forward(model, ids);
      state.pinned = wasLast ? ids.length - 1 : Math.min(state.pinned, ids.length - 1);
    });
    $("attention-tokens").classList.toggle("old", !fine);
    if (!fine) return;
    $("attention-tokens").replaceChildren(...words().map((word, t) => {
      const button = element("button", { type: "button", className: "token", "data-item": "", tabIndex: t === state.pinned ? 0 : -1 },
        element("span", { textContent: word }), element("small"));
      button.addEventListener("click", () => { state.pinned = t; choose(t); });
      button.addEventListener("focus", () => { state.pinned = t; choose(t); });
      button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") choose(t); });
      return button;
    }));
    document.querySelectorAll("#attention-heads .small-picture").forEach((picture, i) => {
      picture.innerHTML = weightPicture(state.found.weights[Math.floor(i / N)][i % N]);
    });
    choose(state.pinned);
  }

  function choose(query) { state.query = query; show(); }

  function show() {
    const { query, layer, head } = state;
    const weights = state.found.weights[layer][head], row = weights[query], all = words();
    [...$("attention-tokens").children].forEach((button, t) => {
      const share = t <= query ? row[t] : 0;
      button.style.setProperty("--share", share.toFixed(3));
      button.dataset.weight = row[t];
      button.classList.toggle("query", t === query);
      button.classList.toggle("later", t > query);
      button.classList.toggle("strong", share > 0.55);
      button.setAttribute("aria-pressed", String(t === state.pinned));
      button.lastChild.textContent = t > query ? "" : Math.round(100 * share);
      button.setAttribute("aria-label", `${all[t]}, ${t > query ? "after the query, not seen" : `${percent(share)} of the attention`}`);
    });
    const most = row.indexOf(Math.max(...row));
    $("attention-line").textContent = `Layer ${layer}, head ${head}: “${all[query]}” at position ${query} attends most to “${all[most]}” at ${most}, ${percent(row[most])}.`;
    drawMatrix(weights, all, query);
    const next = state.found.probabilities[query].map((p, id) => [p, id]).sort((a, b) => b[0] - a[0]);
    const read = state.ids[query + 1];
    $("attention-next-title").textContent = `What comes after “${all[query]}”`;
    $("attention-next").replaceChildren(...next.slice(0, 6).map(([p, id]) => element("li", { "data-probability": p, "data-word": model.words[id], style: `--share: ${p.toFixed(4)}`, className: id === read ? "read" : "" },
      element("span", { textContent: model.words[id] }), element("span", { className: "bar", "aria-hidden": "true" }), element("span", { textContent: percent(p) }),
      ...(id === read ? [element("span", { className: "hidden", textContent: "stands in the sentence" })] : []))));
    const last = state.found.probabilities.at(-1), best = last.indexOf(Math.max(...last));
    $("attention-append").textContent = `Add “${model.words[best]}” to the end`;
    $("attention-append").dataset.word = model.words[best];
    $("attention-append").disabled = state.ids.length >= model.config.max_len;
    $("attention-python").textContent = `captured["block_${layer}/attention/weights"][0, ${head}, ${query}]`;
  }

  function drawMatrix(weights, all, query) {
    const labels = (name) => `<div class="${name}" aria-hidden="true">${all.map((word, t) => `<span class="${t === query ? "query" : ""}">${word}</span>`).join("")}</div>`;
    $("attention-matrix").innerHTML = `${labels("keys")}${labels("queries")}<div class="picture-box">${weightPicture(weights, query)}</div>`;
    $("attention-matrix").style.setProperty("--tokens", all.length);
  }

  on("attention-text", "input", compute);
  on("attention-append", "click", () => write(`${$("attention-text").value.trim()} ${$("attention-append").dataset.word}`));
  on("attention-tokens", "pointerleave", () => choose(state.pinned));
  on("attention-matrix", "pointermove", (event) => {
    const box = event.target.closest(".picture-box")?.getBoundingClientRect();
    if (!box) return;
    const t = Math.floor(((event.clientY - box.top) / box.height) * state.ids.length);
    if (t >= 0 && t < state.ids.length && t !== state.query) choose(t);
  });
  on("attention-matrix", "pointerleave", () => choose(state.pinned));
  rove($("attention-tokens"), () => 1);
  write(examples[0]);
  const looks = state.found.weights[L - 1].map((rows) => rows.at(-1)[model.subject]);
  state.head = looks.indexOf(Math.max(...looks)); // begin at what there is to see
  $("attention-heads").querySelectorAll("input")[(L - 1) * N + state.head].checked = true;
  show();
}

startMasks();
startCache();
const model = loadModel(globalThis.PLAY_MODEL);
startAttention(model);
$("play").arithmetic = { ...arithmetic, model }; // for those who look from a console, and for tests
})();
