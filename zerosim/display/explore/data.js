// Runs as the page has them: tables of words, columns and messages, from which a run is put together when it is asked for.
// What is what in the columns, zerosim/display/run_data.py says. Times are nanoseconds from the step's begin.

const PAGE = JSON.parse(document.getElementById("page").textContent);

// A chunk is the text of many runs, deflated, in base64; it is inflated when the first of its runs is asked for.
const inflated = new Map();

function chunkNamed(name) {
  if (!inflated.has(name)) {
    const text = document.querySelector(`script[data-chunk="${CSS.escape(name)}"]`).textContent;
    const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    inflated.set(name, new Response(stream).json());
  }
  return inflated.get(name);
}

const runs = new Map();

async function runOf(chunkName, key) {
  const name = `${chunkName}|${key}`;
  if (!runs.has(name)) {
    const tables = await chunkNamed(chunkName);
    runs.set(name, new Run(tables, tables.runs[key]));
  }
  return runs.get(name);
}

class Run {
  constructor(tables, raw) {
    const column = (place) => tables.columns[place];
    const words = (place) => column(place).map((word) => tables.words[word]);
    Object.assign(this, { raw, end: raw.end, words, column, text: (place) => tables.words[place] });
    const [operations, algorithms, purposes, spans, groups, nbytes, ahead, messages, numbers] = raw.calls;
    const [spanOf, purposeOf, operationOf, algorithmOf] = [spans, purposes, operations, algorithms].map(words);
    this.calls = operationOf.map((operation, place) => ({
      place, number: column(numbers)[place], operation, algorithm: algorithmOf[place], purpose: purposeOf[place], span: spanOf[place],
      group: column(column(groups)[place]), nbytes: column(nbytes)[place], ahead: column(ahead)[place] === 1,
      steps: tables.messages[column(messages)[place]], parts: [], hops: null,
    }));
    this.ranks = raw.ranks.map((of, rank) => this.rankOf(of, rank));
    this.nameUnits();
    const kinds = new Set(this.ranks.flatMap((rank) => rank.arrays.map((array) => array.kind)));
    this.kinds = [...kinds].sort((a, b) => kindOrder(a) - kindOrder(b));
    this.peak = Math.max(0, ...this.ranks.map((rank) => rank.peak));
    this.streams = [...new Set(this.ranks.flatMap((rank) => rank.parts.map((part) => part.stream)))].filter(
      (stream) => stream !== "communication");
  }

  rankOf(raw, rank) {
    const { words, column } = this;
    const sums = (place) => { let clock = 0; return column(place).map((step) => (clock += step)); };
    let clock = 0;
    const [before, inside, spans, flops] = [column(raw.compute[0]), column(raw.compute[1]), words(raw.compute[2]),
      column(raw.compute[3])];
    const computed = spans.map((span, at) => {
      const start = clock + before[at];
      clock = start + inside[at];
      return { what: "compute", rank, start, end: clock, span, unit: unitOf(span), phase: phaseOf(span), flops: flops[at] };
    });

    const [streams, calls, names, purposes, sizes, issued, toBegin, toJoin, toEnd] = raw.parts;
    const [streamOf, nameOf, purposeOf] = [streams, names, purposes].map(words);
    const parts = sums(issued).map((at, place) => {
      const begun = at + column(toBegin)[place];
      const joined = begun + column(toJoin)[place];
      const call = column(calls)[place] < 0 ? null : this.calls[column(calls)[place]];
      const part = { what: "part", rank, place, stream: streamOf[place], call, name: nameOf[place],
        purpose: purposeOf[place], nbytes: column(sizes)[place], issued: at, begun, joined,
        ended: joined + column(toEnd)[place], start: begun, end: joined + column(toEnd)[place] };
      if (call) call.parts[call.group.indexOf(rank)] = part;
      return part;
    });

    clock = 0;
    const waited = column(raw.waits[1]);
    const waits = column(raw.waits[0]).map((gap, at) => {
      const start = clock + gap;
      clock = start + waited[at];
      return { what: "wait", rank, place: at, start, end: clock, part: parts[column(raw.waits[2])[at]] };
    });

    const phaseNames = words(raw.phases[1]);
    const begins = sums(raw.phases[0]);
    const phases = phaseNames.map((name, at) => ({ name, start: begins[at], end: begins[at + 1] ?? this.end }));
    return { rank, computed, parts, waits, phases, sent: raw.sent, peak: raw.peak, waiting: raw.waiting,
      waitingForHost: raw.waiting_for_host, ...holdings(raw, rank, words, sums, column, this.end) };
  }

  // A call is of the unit whose span it was made in; of a unit gathered ahead, of the one that enters the memory then.
  nameUnits() {
    const gathered = this.ranks.map((rank) => Map.groupBy(rank.arrays.filter((one) => one.kind === "gathered_parameter"),
      (one) => one.born));
    for (const call of this.calls) {
      const part = call.parts[0];
      const array = call.purpose === "parameters" && part && gathered[part.rank].get(part.issued)?.shift();
      call.unit = array ? array.name : unitOf(call.span);
    }
  }

  // All instants at which something begins or ends, rising.
  get instants() {
    this.ownInstants ??= [...new Set([0, this.end, ...this.ranks.flatMap((rank) => [
      ...rank.computed.flatMap((one) => [one.start, one.end]), ...rank.waits.flatMap((one) => [one.start, one.end]),
      ...rank.parts.flatMap((one) => [one.begun, one.joined, one.ended])])])].sort((a, b) => a - b);
    return this.ownInstants;
  }
}

// The unit of a span is the name after that of the part of the step, wherever a program has put its steps.
const PARTS_OF_STEP = ["forward", "backward", "reduce", "all-gather"];
const unitOf = (span) => {
  const names = span.split("/").filter((name) => name !== "recompute");
  const at = names.findIndex((name) => PARTS_OF_STEP.includes(name));
  return at < 0 ? "" : names[at + 1] ?? "";
};
const phaseOf = (span) => span.split("/").find((name) => name in PAGE.phases) ?? "other arithmetic";

// From the bottom of the stack to its top: what rests first, then what lives inside a step, then kinds that only a reader
// of this recording knows.
const KIND_ORDER = Object.keys(PAGE.kindColors);
const kindOrder = (kind) => (KIND_ORDER.indexOf(kind) + KIND_ORDER.length + 1) % (KIND_ORDER.length + 1);

// -- what a rank holds: arrays from birth to death, and the bytes of each kind from each instant to the next ----------

function holdings(raw, rank, words, sums, column, end) {
  const [clocks, kinds, names, changes] = [sums(raw.held[0]), words(raw.held[1]), words(raw.held[2]), column(raw.held[3])];
  const arrays = [];
  const living = new Map();
  const now = {};
  const instants = [];
  let [held, most, peakAt] = [0, -1, 0];
  clocks.forEach((clock, at) => {
    const key = `${kinds[at]} ${names[at]} ${Math.abs(changes[at])}`;
    if (changes[at] > 0) {
      const array = { what: "array", rank, place: arrays.length, kind: kinds[at], name: names[at], nbytes: changes[at],
        born: clock, died: Infinity, from: at, to: Infinity };
      arrays.push(array);
      if (living.has(key)) living.get(key).push(array); else living.set(key, [array]);
    } else {
      const array = living.get(key)?.shift();
      if (array) Object.assign(array, { died: clock, to: at });
    }
    now[kinds[at]] = (now[kinds[at]] ?? 0) + changes[at];
    held += changes[at];
    if (held > most) [most, peakAt] = [held, clock];
    const fullest = instants.at(-1)?.start === clock ? instants.pop().fullest : null;
    const moment = { at, held, kinds: { ...now } };
    instants.push({ start: clock, ...moment, fullest: fullest?.held > held ? fullest : moment });
  });
  if (!instants.length || instants[0].start > 0) instants.unshift({ start: 0, at: -1, held: 0, kinds: {}, fullest: { held: 0 } });
  // Of several changes at one instant the last holds on; a fuller moment between them is a peak of its own, without length.
  instants.forEach((one, at) => {
    one.end = instants[at + 1]?.start ?? end;
    one.top = one.fullest.held > Math.max(one.held, instants[at - 1]?.held ?? 0) ? one.fullest : null;
  });
  return { arrays, instants, peakAt };
}

// What a rank holds from a time on; at the very instant of a peak without length, that peak.
function instantAt(rank, clock) {
  let [low, high] = [0, rank.instants.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rank.instants[middle].start <= clock) low = middle; else high = middle - 1;
  }
  const one = rank.instants[low];
  return one.start === clock && one.top ? { ...one, ...one.top } : one;
}

// The arrays that a rank holds after a change, from the bottom of the stack to its top.
function stackAfter(rank, at) {
  return rank.arrays.filter((array) => array.from <= at && at < array.to)
    .sort((a, b) => kindOrder(a.kind) - kindOrder(b.kind) || a.place - b.place);
}
const stackAt = (rank, clock) => stackAfter(rank, instantAt(rank, clock).at);

// -- the messages of a call, each from when to when ---------------------------------------------------------------------

// A message begins when both its ends are ready for this step, and an end goes on when all its messages of the step have
// come: the rule by which zerosim.planning.streams replays a collective, so that the last messages end when the call does.
function hopsOf(call) {
  if (call.hops) return call.hops;
  let ready = call.parts.map((part) => part.begun);
  const last = Math.max(...call.parts.map((part) => part.ended)); // whole nanoseconds add up to one or two more than it
  const hops = [];
  call.steps.forEach((step, number) => {
    const before = [...ready];
    for (const [source, destination, nanoseconds, nbytes, chunks, addends] of step) {
      const start = Math.min(last, Math.max(before[source], before[destination]));
      const end = Math.min(last, start + nanoseconds);
      hops.push({ step: number, source, destination, start, end, nbytes, chunks, addends });
      for (const place of [source, destination]) ready[place] = Math.max(ready[place], end);
    }
  });
  call.hops = hops;
  return hops;
}

// Whose addends each member has of each chunk at a time: a mask for each, by member and chunk.
function boardOf(call, clock) {
  const members = call.group.length;
  const begins = { all_gather: (member, chunk) => chunk === member, broadcast: () => false }[call.operation] ?? (() => true);
  const board = Array.from({ length: members }, (_, member) => Array.from({ length: members }, (_, chunk) =>
    (begins(member, chunk) ? 1 << member : 0)));
  for (const hop of hopsOf(call)) {
    if (hop.start <= clock) hop.chunks.forEach((chunk, at) => { board[hop.source][chunk] |= hop.addends[at]; });
    if (hop.end <= clock) hop.chunks.forEach((chunk, at) => { board[hop.destination][chunk] |= hop.addends[at]; });
  }
  return board;
}

// Bytes that a rank has sent until a time, for a purpose; until the end they are all that the trace counted.
function sentUntil(run, rank, purpose, clock) {
  let sent = 0;
  for (const call of run.calls) {
    const place = call.purpose === purpose ? call.group.indexOf(rank) : -1;
    if (place < 0) continue;
    for (const hop of hopsOf(call)) sent += hop.source === place && hop.end <= clock ? hop.nbytes : 0;
  }
  return sent;
}

// -- numbers as texts -------------------------------------------------------------------------------------------------

const count = (number) => number.toLocaleString("en-US");
const bytes = (number) => `${count(number)} ${number === 1 ? "byte" : "bytes"}`;
const shortBytes = (number) => (number < 1000 ? `${number} B` : number < 1e6 ? `${+(number / 1e3).toPrecision(3)} kB`
  : number < 1e9 ? `${+(number / 1e6).toPrecision(3)} MB` : `${+(number / 1e9).toPrecision(3)} GB`);
const micro = (nanoseconds) => `${(nanoseconds / 1e3).toLocaleString("en-US",
  { minimumFractionDigits: nanoseconds < 1e6 ? 2 : 0, maximumFractionDigits: nanoseconds < 1e6 ? 2 : 0 })} µs`;
const safe = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
const spaced = (name) => name.replaceAll("_", " ");
const hyphened = (name) => name.replaceAll("_", "-");

function listed(ranks) {
  const groups = [];
  for (const rank of ranks) {
    const last = groups[groups.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank; else groups.push([rank, rank]);
  }
  const texts = groups.map(([low, high]) => (low === high ? `${low}` : high === low + 1 ? `${low}, ${high}` : `${low} to ${high}`));
  return `${ranks.length === 1 ? "Rank" : "Ranks"} ${texts.join(", ")}`;
}
