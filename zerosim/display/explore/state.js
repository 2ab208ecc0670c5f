// The state of the page, all of which but zoom and speed stands in its address: the settings of each side, the clock, the rank that is looked
// at, and what was picked. Views draw what it says and change nothing but it.

const SIDES = ["a", "b"];
const state = { sides: {}, clock: 0, rank: 0, pick: null, compare: false, playing: false, speed: 1, window: null, link: null };
const listeners = new Set();
const changed = (what) => listeners.forEach((listen) => listen(what));

const DEFAULTS = Object.fromEntries(PAGE.axes.map((axis) => [axis.name, axis.initial ?? axis.values[0][0]]));
const chunkName = (setting) => (PAGE.axes.length ? `${setting.n} ${setting.nodes} ${setting.stage}` : "run");
const runKey = (setting) => PAGE.axes.slice(2).map((axis) => setting[axis.name]).join(" ") || "run";

// A setting that the page has: nodes are for four ranks, and units are gathered ahead where they are gathered at all.
function possible(setting) {
  const found = { ...DEFAULTS, ...setting };
  for (const axis of PAGE.axes) {
    if (!axis.values.some(([value]) => value === found[axis.name])) found[axis.name] = DEFAULTS[axis.name];
    if (!isOffered(axis, found)) found[axis.name] = axis.values[0][0];
  }
  return found;
}

const isOffered = (axis, setting) => !axis.only || setting[axis.only[0]] === axis.only[1];

// -- the address --------------------------------------------------------------------------------------------------------

function addressOf() {
  const entries = [];
  const { a, b } = state.sides;
  for (const { name } of PAGE.axes) {
    if (name === "n" || name === "stage" || a[name] !== DEFAULTS[name]) entries.push([name, a[name]]);
  }
  for (const { name } of state.compare ? PAGE.axes : []) {
    if (name === "stage" || b[name] !== a[name]) entries.push([`b.${name}`, b[name]]); // what it leaves out is as in A
  }
  entries.push(["t", +(state.clock / 1000).toFixed(3)]);
  if (state.rank) entries.push(["rank", state.rank]);
  if (state.pick) entries.push(["pick", [state.pick.what, state.pick.rank, state.pick.place ?? 0, ...(state.pick.side === "b" ? ["b"] : [])].join("-")]);
  if (state.theme) entries.push(["theme", state.theme]);
  if (state.line) entries.push(["line", state.line]);
  return `#${entries.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
}

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  const of = (prefix) => Object.fromEntries(PAGE.axes.flatMap(({ name }) => (
    found.has(prefix + name) ? [[name, found.get(prefix + name)]] : [])));
  state.sides.a = possible(of(""));
  state.compare = [...found.keys()].some((name) => name.startsWith("b."));
  state.sides.b = possible({ ...state.sides.a, ...of("b.") });
  state.clock = Math.max(0, Number(found.get("t") ?? 0) * 1000 || 0);
  state.rank = Math.max(0, Math.trunc(Number(found.get("rank") ?? 0)) || 0);
  state.theme = found.get("theme") ?? "";
  state.line = found.get("line") ?? "";
  const [what, rank, place, side] = (found.get("pick") ?? "").split("-");
  state.pick = what ? { what, rank: Number(rank), place: Number(place), side: side ?? "a" } : null;
}

let writing = 0;
function writeAddress() {
  clearTimeout(writing);
  if (location.protocol === "about:") return; // a frame of a notebook has no address of its own
  writing = setTimeout(() => { if (location.hash !== addressOf()) history.replaceState(null, "", addressOf()); }, 120);
}

// -- the clock, one for all views ---------------------------------------------------------------------------------------

const shown = { a: null, b: null }; // the runs
const sidesShown = () => SIDES.filter((side) => shown[side] && (side === "a" || state.compare));
const lastEnd = () => Math.max(1, ...sidesShown().map((side) => shown[side].end));
const windowNow = () => state.window ?? [0, lastEnd()];

function setClock(clock) {
  state.clock = Math.min(lastEnd(), Math.max(0, Math.round(clock)));
  const [low, high] = windowNow();
  if (state.window && (state.clock < low || state.clock > high)) {
    const start = Math.min(Math.max(0, state.clock - (high - low) / 4), lastEnd() - (high - low));
    state.window = [start, start + high - low];
    changed("window");
  }
  changed("clock");
  writeAddress();
}

const SECONDS = 20; // of a run at speed 1

function play(on = !state.playing) {
  state.playing = on;
  changed("playing");
  if (!on) return;
  if (state.clock >= lastEnd()) setClock(0);
  let before = performance.now();
  let exact = state.clock;
  const tick = (now) => {
    if (!state.playing) return;
    if (Math.abs(exact - state.clock) > 1) exact = state.clock; // somebody has moved it
    exact += ((now - before) / 1000 / SECONDS) * lastEnd() * state.speed;
    before = now;
    setClock(exact);
    if (state.clock >= lastEnd()) play(false); else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

function stepTo(way, instants) {
  const next = way > 0 ? instants.find((one) => one > state.clock) : instants.findLast((one) => one < state.clock);
  if (next !== undefined) setClock(next);
}

const allInstants = () => [...new Set(sidesShown().flatMap((side) => shown[side].instants))].sort((a, b) => a - b);
const allMessages = () => [...new Set(sidesShown().flatMap((side) => shown[side].calls.flatMap((call) => hopsOf(call)
  .flatMap((hop) => [hop.start, hop.end]))))].sort((a, b) => a - b);

function zoomBy(factor, at = state.clock) {
  const [low, high] = windowNow();
  const width = Math.max(lastEnd() / 500, (high - low) / factor);
  if (width >= lastEnd()) state.window = null;
  else {
    const share = Math.min(1, Math.max(0, (at - low) / (high - low)));
    const start = Math.min(Math.max(0, at - share * width), lastEnd() - width);
    state.window = [start, start + width];
  }
  changed("window");
}

// -- what was picked, and what is pointed at ----------------------------------------------------------------------------

function thing(pick = state.pick) {
  const rank = pick && SIDES.includes(pick.side) && shown[pick.side]?.ranks[pick.rank];
  if (!rank) return null;
  return { compute: rank.computed, part: rank.parts, wait: rank.waits, array: rank.arrays }[pick.what]?.[pick.place] ?? null;
}

function pick(side, one) {
  const { what, rank } = one;
  const place = one.place ?? shown[side].ranks[rank].computed.indexOf(one);
  Object.assign(state, { pick: { what, rank, place, side }, rank });
  changed("pick");
  writeAddress();
}

// A link names what things in several views have in common; each view lights up what has it.
function linkOf(one) {
  if (!one) return null;
  if (one.what === "wait") return linkOf(one.part);
  if (one.what === "part") return { call: one.call?.place ?? null, carries: one.call?.unit, purpose: one.purpose, part: one };
  if (one.what === "array") return { array: one, kind: one.kind, unit: one.kind === "gathered_parameter" || one.kind === "unit_gradient" ? one.name : null };
  if (one.what === "compute") return { unit: one.unit || null, span: one.unit ? null : one.span, phase: one.phase };
  return one;
}

function setLink(link) {
  if (JSON.stringify(linkKey(link)) === JSON.stringify(linkKey(state.link))) return;
  state.link = link;
  changed("link");
}

const linkKey = (link) => link && [link.call, link.unit, link.kind, link.purpose, link.rank, link.array?.rank, link.array?.place, link.part?.place, link.part?.rank, link.span];

const CARRIED = { parameters: "gathered_parameter", gradients: "unit_gradient" }; // the arrays that a message is about

function isLit(one, link = state.link) {
  if (!link) return false;
  if (link.rank != null && link.kind == null) return one.rank === link.rank;
  if (one.what === "part") {
    if (link.part && !link.part.call) return one === link.part;
    if (link.call != null) return one.call?.place === link.call;
    if (link.unit) return one.call?.unit === link.unit;
    return link.purpose != null && link.call == null && one.purpose === link.purpose;
  }
  if (one.what === "wait") return isLit(one.part, link);
  if (one.what === "compute") {
    if (link.array) return one.rank === link.array.rank && one.end > link.array.born && one.start < link.array.died && link.array.born > 0;
    return Boolean(link.unit && one.unit === link.unit) || Boolean(link.span && one.span === link.span);
  }
  if (one.what === "array") {
    if (link.array) return one === link.array;
    if (link.call != null) return one.name === link.carries && one.kind === CARRIED[link.purpose];
    if (link.kind) return one.kind === link.kind;
    return Boolean(link.unit) && one.name === link.unit;
  }
  return false;
}
