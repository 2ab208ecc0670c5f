// ZeRO in one file, line by line: the lines that ranks came to, what their functions saw there, and what every rank keeps.
// All of it was recorded while the file ran (zerosim/course/tiny_steps.py). It has a clock of its own: the row of the line.

const KEPT = ["weights", "gradients", "master", "m", "v"];

class TinySteps {
  constructor(box) {
    this.box = box;
    addEventListener("hashchange", () => { if (state.line && box.open) this.open(); else box.open ||= state.line; });
    box.addEventListener("toggle", () => { if (box.open) this.open(); });
    if (state.line) box.open = true;
  }

  async open() {
    if (!this.data) {
      this.data = await chunkNamed("tiny");
      this.build();
      if (state.line) requestAnimationFrame(() => this.box.scrollIntoView());
    }
    const [stage, row] = (state.line || "ZeRO3.1").split(".");
    this.go(Object.hasOwn(this.data.runs, stage) ? stage : "ZeRO3", Math.trunc(Number(row) || 1) - 1);
  }

  build() {
    const stages = Object.keys(this.data.runs);
    this.box.insertAdjacentHTML("beforeend", `<div class="panel tiny" tabindex="-1">
      <div class="buttons" role="group" aria-label="Steps through the file">
        <label>stage <select>${stages.map((stage) => `<option>${stage}</option>`).join("")}</select></label>
        <button type="button" data-go="back" title="← : one line back" aria-label="one line back">◀</button>
        <button type="button" data-go="on" title="→ : one line on" aria-label="one line on">▶</button>
        <button type="button" data-go="over" title="↓ : on to the next line of this function, or of the one that called it">over</button>
        <button type="button" data-go="turn" title="M : on to where the other rank goes on">next rank's turn</button>
        <input type="range" min="0" value="0" aria-label="Line of the run"><output></output>
      </div>
      <div class="both"><ol class="source">${this.data.source.map((line) => `<li>${safe(line) || " "}</li>`).join("")}</ol>
      <div class="sees" aria-live="polite"></div></div></div>`);
    [this.panel, this.select, this.range, this.out, this.source, this.sees] = [".tiny", "select", "input", "output", ".source", ".sees"]
      .map((name) => this.box.querySelector(name));
    this.select.addEventListener("change", () => this.go(this.select.value, 0));
    this.range.addEventListener("input", () => this.go(this.stage, Number(this.range.value)));
    this.panel.addEventListener("click", (event) => {
      const way = event.target.closest("[data-go]")?.dataset.go;
      if (way) this.step(way);
    });
    this.panel.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: "back", ArrowRight: "on", ArrowDown: "over", m: "turn" }[event.key];
      event.stopPropagation(); // the page's own clock stands still
      if (!way || event.target.matches("select, input")) return;
      event.preventDefault();
      this.step(way);
    });
  }

  get run() { return this.data.runs[this.stage]; }

  // Rows whose rank is this one's: what the function saw before is the last of them with the same depth and name.
  before(row) {
    const [rank, , depth, name] = this.run.lines[row];
    for (let at = row - 1; at >= 0; at -= 1) {
      const [otherRank, , otherDepth, otherName] = this.run.lines[at];
      if (otherRank !== rank) continue;
      if (otherDepth < depth) return null;
      if (otherDepth === depth) return otherName === name ? this.run.lines[at] : null;
    }
    return null;
  }

  step(way) {
    const { lines } = this.run;
    const [rank, , depth] = lines[this.row] ?? [0, 0, 0];
    const found = {
      back: () => this.row - 1,
      on: () => this.row + 1,
      over: () => lines.findIndex(([r, , d], at) => at > this.row && r === rank && d <= depth),
      turn: () => lines.findIndex(([r], at) => at > this.row && r !== rank),
    }[way]();
    this.go(this.stage, found < 0 && way !== "back" ? lines.length : found);
  }

  go(stage, row) {
    this.stage = stage;
    this.row = Math.max(0, Math.min(row, this.run.lines.length));
    state.line = `${stage}.${this.row + 1}`;
    writeAddress();
    this.draw();
  }

  // Each rank's last line so far: where it stands.
  standing(row) {
    const found = new Map();
    for (let at = 0; at <= Math.min(row, this.run.lines.length - 1); at += 1) found.set(this.run.lines[at][0], this.run.lines[at]);
    return found;
  }

  stateAt(row, before = false) {
    const places = Object.keys(this.run.states).map(Number).filter((place) => place <= row);
    const place = before ? places.at(-2) : places.at(-1);
    return place === undefined ? null : { place, ranks: this.run.states[place] };
  }

  draw() {
    const { lines } = this.run;
    const now = lines[this.row];
    [this.select.value, this.range.max, this.range.value] = [this.stage, lines.length, this.row];
    this.out.textContent = now ? `${this.row + 1} of ${lines.length}` : "the step has ended";
    this.source.querySelectorAll("li").forEach((item) => { item.className = ""; item.removeAttribute("data-ranks"); });
    for (const [rank, [, number]] of this.standing(this.row)) {
      const item = this.source.children[number - 1];
      item.classList.add("stands");
      item.dataset.ranks = [item.dataset.ranks, `rank ${rank}`].filter(Boolean).join(", ");
      item.style.setProperty("--rank", PAGE.ranks[rank]);
    }
    if (now) {
      const item = this.source.children[now[1] - 1];
      item.classList.add("now");
      item.style.setProperty("--rank", PAGE.ranks[now[0]]);
      this.source.scrollTop = Math.max(0, item.offsetTop - this.source.clientHeight / 2);
    }
    this.sees.innerHTML = (now ? this.values(now) : "<h4>The step has ended: this is what ranks keep</h4>") + this.keeps();
  }

  values([rank, number, , name, values]) {
    const before = this.before(this.row)?.[4] ?? {};
    const rows = Object.entries(values).map(([key, value]) => `<tr${before[key] === value ? "" : ' class="lit"'}><th>${safe(key)}</th><td>${safe(value)}</td></tr>`);
    return `<h4><i style="background:${PAGE.ranks[rank]}"></i>Rank ${rank} is about to run line ${number}, in <code>${safe(name)}</code></h4>
      <div class="scroll"><table><tbody>${rows.join("")}</tbody></table></div>`;
  }

  keeps() {
    const now = this.stateAt(this.row);
    if (!now) return "";
    const old = now.place === this.row ? this.stateAt(this.row, true) : now; // changed by the line just before
    const row = (name, of) => `<tr><th>${name}</th>${now.ranks.map((one, rank) => {
      const [value, was] = [of(one), old ? of(old.ranks[rank]) : null];
      return `<td${was !== null && was !== value ? ' class="new"' : ""}>${safe(value)}</td>`;
    }).join("")}</tr>`;
    const matrices = now.ranks[0].kept.map((_, matrix) => `<tr class="head"><th colspan="9">matrix ${matrix + 1}</th></tr>${
      KEPT.map((kind) => row(kind, (one) => one.kept[matrix][kind])).join("")}`);
    return `<div class="scroll"><table><thead><tr><th>What they keep</th>${now.ranks.map((_, rank) => (
      `<th><i style="background:${PAGE.ranks[rank]}"></i>rank ${rank}</th>`)).join("")}</tr></thead><tbody>${matrices.join("")}
      <tr class="head"><th colspan="9">messages</th></tr>${row("in the inbox", (one) => one.inbox.join(" ") || "nothing")}${
      row("sent so far", (one) => `${one.sent} bytes`)}</tbody></table></div>`;
  }
}

const tinyBox = document.getElementById("tiny");
if (tinyBox) new TinySteps(tinyBox);
