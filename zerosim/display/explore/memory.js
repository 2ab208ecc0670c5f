// Memory over time: for each rank what it holds, stacked by kind, on one scale; under it the bytes at the clock, in numbers.

class Memory {
  constructor(side, box) {
    this.side = side;
    box.innerHTML = `<h3>Memory <small></small></h3>
      <div class="canvas" tabindex="0" role="application" aria-roledescription="memory over time"><canvas></canvas><div class="cursor"></div></div>
      <div class="scroll" tabindex="0" role="region" aria-label="Bytes held at the clock"><table class="held"></table></div>`;
    [this.said, this.holder, this.canvas, this.cursor, this.table] = ["small", ".canvas", "canvas", ".cursor", "table"].map(
      (name) => box.querySelector(name));
    wireCanvas(this);
    this.table.addEventListener("pointerover", (event) => {
      const kind = event.target.closest("tr")?.dataset.kind;
      if (kind) setLink({ kind });
    });
    this.table.addEventListener("pointerleave", () => setLink(null));
  }

  get rankHeight() { return this.run.ranks.length > 4 ? 52 : this.run.ranks.length > 2 ? 70 : 96; }
  get scale() { return Math.max(1, ...sidesShown().map((side) => shown[side].peak)); }

  show(run) {
    this.run = run;
    const fullest = run.ranks.reduce((a, b) => (b.peak > a.peak ? b : a));
    this.said.textContent = `at most ${bytes(run.peak)}${run.ranks.length > 1 ? ` on rank ${fullest.rank}` : ""}, at ${micro(fullest.peakAt)}`;
    this.holder.setAttribute("aria-label", `Memory of ${run.ranks.length} ranks, stacked by kind: ${this.said.textContent}. Enter asks what a byte at the clock is.`);
    const head = run.ranks.map((rank) => `<th scope="col" class="n">rank ${rank.rank}</th>`).join("");
    const row = (name, title, swatch) => `<tr data-kind="${safe(name)}"><th scope="row">${swatch}${title}</th>${run.ranks.map(() => '<td class="n"></td>').join("")}</tr>`;
    this.table.innerHTML = `<caption>Held now, in bytes</caption><thead><tr><th scope="col">kind</th>${head}</tr></thead><tbody>${run.kinds.map(
      (kind) => row(kind, safe(spaced(kind)), `<i style="background:${kindColor(kind)}"></i>`)).join("")}</tbody><tfoot>${row("", "all", "")}
      <tr><th scope="row">at the fullest</th>${run.ranks.map((rank) => `<td class="n">${count(rank.peak)}</td>`).join("")}</tr></tfoot>`;
    this.draw();
    this.numbers();
  }

  draw() {
    if (!this.run) return;
    const { run, rankHeight } = this;
    this.top = 4;
    const height = this.top + run.ranks.length * rankHeight + 22;
    const { ink, width, x } = prepared(this.canvas, height);
    this.x = x;
    ink.save();
    ink.beginPath();
    ink.rect(GUTTER, 0, width - GUTTER - 8, height);
    ink.clip();
    run.ranks.forEach((rank, at) => this.areas(ink, rank, this.top + (at + 1) * rankHeight - 6));
    ink.restore();
    run.ranks.forEach((rank, at) => {
      const base = this.top + (at + 1) * rankHeight - 6;
      const line = base - this.tall(rank.peak);
      nameRank(ink, rank.rank, base - rankHeight / 2 + 3);
      ink.fillStyle = color("faint");
      ink.fillRect(GUTTER, base, width - GUTTER - 8, 1);
      ink.setLineDash([3, 3]);
      ink.strokeStyle = color("muted");
      ink.beginPath();
      ink.moveTo(GUTTER, line);
      ink.lineTo(width - 8, line);
      ink.stroke();
      ink.setLineDash([]);
      const words = shortBytes(rank.peak);
      const left = width - 12 - ink.measureText(words).width;
      ink.fillStyle = color("panel");
      ink.globalAlpha = 0.85;
      ink.fillRect(left - 3, line + 1, width - 8 - left, 14);
      ink.globalAlpha = 1;
      ink.fillStyle = color("ink");
      ink.fillText(words, left, line + 9);
    });
    axis(ink, x, width, height);
    this.moveCursor();
  }

  tall(nbytes) { return (nbytes / this.scale) * (this.rankHeight - 10); }

  // The stacks of a rank, each from where to where: from each instant to the next, and a peak without length as a thin bar.
  stacks(rank) {
    const lasting = rank.instants.filter((one) => one.end > one.start).map((one) => {
      const left = this.x(one.start);
      return { ...one, left, width: Math.max(0.6, this.x(one.end) - left) };
    });
    return [...lasting, ...rank.instants.filter((one) => one.top).map((one) => ({ ...one.top, left: this.x(one.start), width: 4, isPeak: true }))];
  }

  areas(ink, rank, base) {
    const { link } = state;
    const stacks = this.stacks(rank);
    const below = stacks.map(() => 0);
    for (const kind of this.run.kinds) {
      if (!stacks.some((one) => one.kinds[kind])) continue;
      ink.globalAlpha = link && (link.kind ?? kind) !== kind ? 0.3 : link && !link.kind ? 0.55 : 1;
      ink.fillStyle = kindColor(kind);
      ink.beginPath();
      stacks.forEach((one, at) => {
        const nbytes = one.kinds[kind] ?? 0;
        if (nbytes) ink.rect(one.left, base - this.tall(below[at] + nbytes), one.width, this.tall(nbytes));
        below[at] += nbytes;
      });
      ink.fill();
    }
    ink.globalAlpha = 1;
    ink.fillStyle = color("ink");
    for (const one of stacks.filter(({ isPeak }) => isPeak)) ink.fillRect(one.left, base - this.tall(one.held) - 1, one.width, 2);
    const lit = rank.arrays.filter((array) => array === thing() || ((link?.array || link?.unit || link?.carries) && isLit(array)));
    for (const array of lit) this.outline(ink, rank, array, base);
  }

  // The place of one array in the stack, as long as it lives.
  outline(ink, rank, array, base) {
    ink.fillStyle = color("ink");
    for (const one of this.stacks(rank)) {
      if (one.at < array.from || one.at >= array.to) continue;
      const stack = stackAfter(rank, one.at);
      const under = stack.slice(0, stack.indexOf(array)).reduce((sum, other) => sum + other.nbytes, 0);
      const [top, low] = [base - this.tall(under + array.nbytes), base - this.tall(under)];
      ink.globalAlpha = 0.35;
      ink.fillRect(one.left, top, one.width, low - top);
      ink.globalAlpha = 1;
      ink.fillRect(one.left, top - 0.75, one.width, 1.5);
      ink.fillRect(one.left, low - 0.75, one.width, 1.5);
    }
  }

  numbers() {
    if (!this.run) return;
    const now = this.run.ranks.map((rank) => instantAt(rank, state.clock));
    for (const row of this.table.querySelectorAll("tr[data-kind]")) {
      const { kind } = row.dataset;
      row.querySelectorAll("td").forEach((cell, at) => {
        const nbytes = kind ? now[at].kinds[kind] ?? 0 : now[at].held;
        const words = nbytes ? count(nbytes) : "–";
        if (cell.textContent !== words) cell.textContent = words;
      });
    }
  }

  light() {
    for (const row of this.table.querySelectorAll("tr[data-kind]")) {
      row.classList.toggle("lit", Boolean(state.link?.kind) && row.dataset.kind === state.link.kind);
    }
  }

  moveCursor() { placeCursor(this); }

  hit(pixelX, pixelY) {
    const at = Math.floor((pixelY - this.top) / this.rankHeight);
    const rank = this.run.ranks[at];
    if (!rank) return null;
    if (pixelX < GUTTER) return { what: "rank", rank: rank.rank };
    const base = this.top + (at + 1) * this.rankHeight - 6;
    const nbytes = ((base - pixelY) / (this.rankHeight - 10)) * this.scale;
    const found = (at) => {
      let under = 0;
      return stackAfter(rank, at).find((array) => (under += array.nbytes) > nbytes && nbytes >= 0) ?? null;
    };
    const near = rank.instants.filter((one) => one.top && Math.abs(this.x(one.start) - pixelX) <= 4);
    return found(instantAt(rank, this.x.back(pixelX)).at) ?? near.map((one) => found(one.top.at)).find(Boolean) ?? null;
  }
}
