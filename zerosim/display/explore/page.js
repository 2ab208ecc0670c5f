// The page: its controls, its keys, and who is shown what when the state changes.

const main = document.getElementById("views");
const answer = document.getElementById("answer");
const views = { a: [], b: [] };
const of = (side, kind) => views[side].find((view) => view instanceof kind);

// -- one side: its settings, and its views ------------------------------------------------------------------------------

function build(side) {
  const box = document.createElement("section");
  box.className = "side";
  box.dataset.side = side;
  box.setAttribute("aria-label", side === "a" ? "Setting A" : "Setting B");
  box.innerHTML = `<form class="settings" ${PAGE.axes.length ? "" : "hidden"}></form><div class="grid"><div class="wide"></div><div class="narrow"></div><div class="third"></div></div>`;
  main.append(box);
  const panels = [[Timeline, ".wide"], [Memory, ".wide"], [Ring, ".narrow"], ...(PAGE.axes.length ? [[Formulas, ".narrow"], [Numbers, ".third"]] : [])];
  views[side] = panels.map(([View, column]) => {
    const panel = document.createElement("div");
    panel.className = `panel ${View.name.toLowerCase()}`;
    box.querySelector(column).append(panel);
    return new View(side, panel);
  });
  if (PAGE.axes.length) buildSettings(side, box.querySelector("form"));
  return box;
}

function buildSettings(side, form) {
  form.innerHTML = `<strong class="letter">${side.toUpperCase()}</strong>${PAGE.axes.map((axis) => `<fieldset data-axis="${axis.name}" title="${axis.help}"><legend>${axis.label}</legend>${axis.values.map(
    ([value, words]) => `<label><input type="radio" name="${side}.${axis.name}" value="${value}"><span>${words}</span></label>`).join("")}</fieldset>`).join("")}`;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("click", (event) => { if (event.detail) setTimeout(() => document.activeElement.blur()); }); // a mouse's
  form.addEventListener("change", (event) => {
    const [, name] = event.target.name.split(/\.(.*)/);
    state.sides[side] = possible({ ...state.sides[side], [name]: event.target.value });
    state.pick = null;
    show();
  });
}

function showSettings(side) {
  const setting = state.sides[side];
  for (const axis of PAGE.axes) {
    const fieldset = main.querySelector(`[data-side=${side}] [data-axis=${axis.name}]`);
    fieldset.disabled = !isOffered(axis, setting);
    for (const input of fieldset.querySelectorAll("input")) input.checked = input.value === setting[axis.name];
  }
}

// -- shown anew when the settings, or the address, change ---------------------------------------------------------------

let asked = 0;

async function show() {
  asked += 1;
  const mine = asked;
  document.body.classList.toggle("comparing", state.compare);
  document.getElementById("compare").setAttribute("aria-pressed", state.compare);
  if (state.compare && !views.b.length) build("b");
  const found = {};
  for (const side of state.compare ? SIDES : ["a"]) {
    if (PAGE.axes.length) showSettings(side);
    try {
      found[side] = await runOf(chunkName(state.sides[side]), runKey(state.sides[side]));
    } catch (error) {
      answer.textContent = `The runs in this page cannot be read here (${error.message}). Take a browser of 2024 or later, or another copy of the page.`;
      throw error;
    }
  }
  if (mine !== asked) return; // something else has been asked for since
  Object.assign(shown, { a: null, b: null }, found);
  state.rank = Math.min(state.rank, Math.max(...Object.values(found).map((run) => run.ranks.length)) - 1);
  state.window = null;
  state.clock = Math.min(state.clock, lastEnd());
  for (const side of sidesShown()) {
    views[side].forEach((view) => view.show(found[side]));
  }
  const strip = document.getElementById("difference");
  strip.hidden = !state.compare;
  if (state.compare) strip.textContent = difference(found.a, found.b);
  range.max = lastEnd();
  redrawAll();
  setClock(state.clock);
  say();
  document.documentElement.dataset.ready = "1";
}

function redrawAll() {
  for (const side of sidesShown()) { of(side, Timeline).draw(); of(side, Memory).draw(); }
}

let frame = 0;
listeners.add((what) => {
  if (what === "clock") onClock();
  if (what === "playing") document.getElementById("play").textContent = state.playing ? "❚❚ Pause" : "▶ Play";
  if (what === "pick" || what === "rank") say();
  if (what !== "clock" && what !== "playing") {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => {
      redrawAll();
      for (const side of sidesShown()) {
        views[side].forEach((view) => view.light?.());
        of(side, Ring).draw();
        if (what === "rank" || what === "pick") of(side, Formulas)?.draw();
      }
    });
  }
});

const range = document.getElementById("range");
const clock = document.getElementById("now");

function onClock() {
  range.value = state.clock;
  clock.textContent = micro(state.clock);
  range.setAttribute("aria-valuetext", micro(state.clock));
  for (const side of sidesShown()) {
    of(side, Timeline).moveCursor();
    of(side, Memory).moveCursor();
    of(side, Memory).numbers();
    of(side, Ring).draw();
    of(side, Numbers)?.draw();
    of(side, Formulas)?.clock();
  }
  if (!thing() || state.playing) happening();
}

// -- what is said -------------------------------------------------------------------------------------------------------

function say() {
  const one = thing();
  if (!one) { happening(); return; }
  const run = shown[state.pick.side];
  answer.innerHTML = `<b>${state.compare ? `${state.pick.side.toUpperCase()}: ` : ""}</b>`;
  answer.append(ANSWERS[one.what](run, one).join(" "));
}

function happening() {
  answer.replaceChildren(...sidesShown().map((side) => {
    const line = document.createElement("div");
    line.textContent = `${state.compare ? `${side.toUpperCase()}: ` : ""}${whatHappens(shown[side], state.clock).join(" ")}`;
    return line;
  }));
}

// Why is this rank waiting, or what else does it do; again, the next thing that it does at the clock.
function askRank(side = "a") {
  const rank = shown[side].ranks[Math.min(state.rank, shown[side].ranks.length - 1)];
  const on = (one) => one.start <= state.clock && state.clock < one.end;
  const ones = [...rank.waits.filter(on), ...rank.computed.filter(on), ...rank.parts.filter(on)];
  const next = ones[(ones.indexOf(thing()) + 1) % ones.length];
  if (next) pick(side, next); else { state.pick = null; say(); }
}

// What is the largest array that the rank holds at the clock; again, the next one.
function askByte(side = "a") {
  const rank = shown[side].ranks[Math.min(state.rank, shown[side].ranks.length - 1)];
  const ones = stackAt(rank, state.clock).sort((a, b) => b.nbytes - a.nbytes || a.place - b.place);
  const next = ones[(ones.indexOf(thing()) + 1) % ones.length];
  if (next) pick(side, next);
}

function toPeak() {
  play(false);
  const ranks = shown.a.ranks;
  const fullest = ranks.reduce((a, b) => (b.peak > a.peak ? b : a));
  state.rank = fullest.rank;
  state.pick = null;
  setClock(fullest.peakAt);
  say();
}

// -- controls and keys --------------------------------------------------------------------------------------------------

function compare(on = !state.compare) {
  state.compare = on;
  state.pick = null;
  show();
}

function darkOrLight() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  state.theme = dark ? "light" : "dark";
  themed();
  redrawAll();
  writeAddress();
}

function themed() {
  if (state.theme) document.documentElement.dataset.theme = state.theme; else delete document.documentElement.dataset.theme;
}

const ACTIONS = {
  play: () => play(), back: () => { play(false); stepTo(-1, allInstants()); }, on: () => { play(false); stepTo(1, allInstants()); },
  "message-back": () => { play(false); stepTo(-1, allMessages()); }, "message-on": () => { play(false); stepTo(1, allMessages()); },
  first: () => { play(false); setClock(0); }, last: () => { play(false); setClock(lastEnd()); },
  in: () => zoomBy(2), out: () => zoomBy(0.5), all: () => { state.window = null; changed("window"); },
  why: () => askRank(), byte: () => askByte(), peak: toPeak, compare: () => { if (PAGE.axes.length) compare(); }, theme: darkOrLight,
  rank: () => setRank((state.rank + 1) % shown.a.ranks.length),
  none: () => { state.pick = null; state.link = null; changed("pick"); writeAddress(); },
};
const KEYS = { " ": "play", ArrowLeft: "back", ArrowRight: "on", Home: "first", End: "last", "+": "in", "=": "in", "-": "out", 0: "all",
  w: "why", b: "byte", p: "peak", c: "compare", d: "theme", r: "rank", Escape: "none" };

document.addEventListener("click", (event) => {
  const action = event.target.closest("[data-do]")?.dataset.do;
  if (action) ACTIONS[action]();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const own = event.target.matches("select, summary") || (event.key === " " && event.target.matches("button, a"))
    || (event.target.matches("[type=radio]") && event.key.startsWith("Arrow")); // keys of the control itself
  if (own) return;
  const name = event.shiftKey && event.key.startsWith("Arrow") ? { ArrowLeft: "message-back", ArrowRight: "message-on" }[event.key]
    : KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!name) return;
  event.preventDefault();
  ACTIONS[name]();
});
range.addEventListener("input", () => { play(false); setClock(Number(range.value)); });
document.getElementById("speed").addEventListener("change", (event) => { state.speed = Number(event.target.value); });

// -- the window, the light, paper, the address --------------------------------------------------------------------------

new ResizeObserver(() => redrawAll()).observe(main);
const transport = document.getElementById("transport");
new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${transport.offsetHeight + 12}px`)).observe(transport);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("beforeprint", () => { document.documentElement.dataset.paper = "1"; redrawAll(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.paper; redrawAll(); });
addEventListener("hashchange", () => { if (location.hash !== addressOf()) { play(false); readAddress(); themed(); show(); } });

document.body.classList.toggle("run-alone", !PAGE.axes.length);
document.querySelector(".switches").innerHTML = PAGE.axes.map((axis) => `<div><dt>${axis.label}:</dt> <dd>${axis.help}.</dd></div>`).join("");
readAddress();
themed();
build("a");
show();
