// The four weights of the worked example, trained for the same step under the same setting: every rank's numbers at the
// moment of the clock. What has changed since the moment before is marked.

const WEIGHTS = ["w1", "w2", "w3", "w4"];
const MOMENTS = { start: "at the start", reduce: "reduced", update: "updated", end: "at the end" };
const STATE_WORDS = { parameter: "weight", gradient: "gradient", master: "fp32 master", m: "Adam's m", v: "Adam's v" };
const STATE_KINDS = { parameter: "parameter", gradient: "gradient", master: "master", m: "optimizer_state", v: "optimizer_state" };
const PASSES = ["x1", "x2", "target", "a", "y", "loss"];

class Numbers {
  constructor(side, box) {
    this.side = side;
    box.innerHTML = `<h3>Four weights <small></small></h3>
      <p class="model">h = w1·x1 + w2·x2, a = relu(h), y = w3·a + w4, loss = ½(y − target)²</p>
      <div class="moments" role="group" aria-label="Moments of the step"></div><div class="cards"></div><p class="under"></p>`;
    [this.said, this.moments, this.cards, this.words] = ["small", ".moments", ".cards", ".under"].map((name) => box.querySelector(name));
    this.moments.addEventListener("click", (event) => {
      const { moment } = event.target.dataset;
      if (moment !== undefined) { play(false); setClock(this.clockOf(Number(moment))); }
    });
    this.cards.addEventListener("pointerover", (event) => {
      const kind = event.target.closest("[data-kind]")?.dataset.kind;
      const rank = event.target.closest("[data-rank]")?.dataset.rank;
      setLink(kind ? { kind } : rank ? { rank: Number(rank) } : null);
    });
    this.cards.addEventListener("pointerleave", () => setLink(null));
  }

  show(run) {
    this.run = run;
    this.data = run.raw.numbers;
    this.at = null;
    this.moments.innerHTML = this.data.moments.map((moment, at) => `<button type="button" data-moment="${at}">${
      MOMENTS[moment] ?? moment.replace(/^backward (\d)/, this.data.moments.includes("backward 2") ? "after backward $1" : "after backward")}</button>`).join("");
    this.cards.className = `cards of-${run.ranks.length}`;
    this.draw();
  }

  // The clock of each moment: when the spans of the large run that are named like it have ended on rank 0.
  clockOf(moment) {
    const { phases } = this.run.ranks[0];
    const name = this.data.moments[moment];
    if (name === "start") return 0;
    if (name === "end") return this.run.end;
    const [wanted, number] = name.split(" ");
    return phases.filter((phase) => phase.name === wanted)[(number ?? 1) - 1]?.end ?? this.run.end;
  }

  get moment() {
    let found = 0;
    this.data.moments.forEach((_, at) => { if (this.clockOf(at) <= state.clock) found = at; });
    return found;
  }

  draw() {
    if (!this.run || this.moment === this.at) return;
    const { data, run } = this;
    this.at = this.moment;
    this.said.textContent = "another model, the same step, number by number";
    this.moments.querySelectorAll("button").forEach((button, at) => button.setAttribute("aria-pressed", at === this.at));
    const batch = Number(data.moments[this.at].split(" ")[1] ?? (this.at ? data.passes[0].length : 1)) - 1;
    this.cards.innerHTML = run.ranks.map(({ rank }) => {
      const now = run.column(data.looks[rank][this.at]).map((place) => run.words(place));
      const before = this.at ? run.column(data.looks[rank][this.at - 1]).map((place) => run.words(place)) : now;
      const rows = data.states.map((name, at) => `<tr data-kind="${STATE_KINDS[name]}"><th scope="row">${STATE_WORDS[name] ?? name}</th>${now[at].map((text, weight) =>
        `<td class="${text === "" ? "none" : text !== before[at][weight] ? "new" : ""}">${this.short(text)}</td>`).join("")}</tr>`).join("");
      return `<table data-rank="${rank}"><caption><i style="background:${rankColor(rank)}"></i>rank ${rank}${this.passWords(rank, batch)}</caption>
        <thead><tr><td></td>${WEIGHTS.map((name) => `<th scope="col">${name}</th>`).join("")}</tr></thead><tbody>${rows}</tbody></table>`;
    }).join("");
    this.words.innerHTML = `Empty: this rank holds no copy. ${this.whyEmpty()}Marked: changed since the moment before. ${data.divisor > 1
      ? `Gradients are sums; the update divides them by ${data.divisor}${run.ranks.length * data.passes[0].length === data.divisor ? "" : ", the loss scale among it"}.` : ""}`;
  }

  // Ranks that own none of the weights: each unit has two, and so shards of one on two ranks, and padding on others.
  whyEmpty() {
    const { data, run } = this;
    const master = data.states.indexOf("master");
    const empty = run.ranks.filter(({ rank }) => run.words(run.column(data.looks[rank][0])[master]).every((text) => text === "")).map(({ rank }) => rank);
    return empty.length ? `${listed(empty)} own${empty.length === 1 ? "s" : ""} none of the four weights: each of the two units has two weights, a shard of one on ranks 0 and 1, and only padding here. ` : "";
  }

  passWords(rank, batch) {
    const pass = this.run.words(this.data.passes[rank][batch]);
    if (!this.at) return ` <span>x = (${pass[0]}, ${pass[1]}), target ${pass[2]}</span>`;
    return ` <span>a ${pass[3]}, y ${this.short(pass[4])}, loss ${this.short(pass[5])}; own gradient ${pass.slice(6).map((one) => this.short(one)).join(", ")}</span>`;
  }

  // Long decimals are cut where they stand; all of their digits are in the title.
  short(text) {
    if (text.length <= 8) return text.replace("-", "−");
    return `<span title="${text}">${String(+Number(text).toPrecision(5)).replace("-", "−")}</span>`;
  }

  light() {
    for (const row of this.cards.querySelectorAll("[data-kind]")) row.classList.toggle("lit", state.link?.kind === row.dataset.kind);
    for (const table of this.cards.querySelectorAll("[data-rank]")) table.classList.toggle("lit", state.link?.rank === Number(table.dataset.rank) && !state.link.kind);
  }
}
