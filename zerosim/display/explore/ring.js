// The ring: the ranks on a circle, what each has of every chunk and whose addends are in it, and the messages on their way.

const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes, ...children) {
  const one = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  one.append(...children);
  return one;
}

class Ring {
  constructor(side, box) {
    this.side = side;
    box.innerHTML = '<h3>Ring <small></small></h3><svg viewBox="0 0 440 400" role="img"></svg><p class="under"></p>';
    [this.said, this.svg, this.words] = ["small", "svg", "p"].map((name) => box.querySelector(name));
    this.svg.addEventListener("pointerover", (event) => {
      const node = event.target.closest("[data-rank]");
      const call = event.target.closest("[data-call]");
      if (node) setLink({ rank: Number(node.dataset.rank) });
      else if (call) setLink({ call: Number(call.dataset.call) });
    });
    this.svg.addEventListener("pointerleave", () => setLink(null));
    this.svg.addEventListener("click", (event) => {
      const node = event.target.closest("[data-rank]");
      if (node) setRank(Number(node.dataset.rank));
    });
  }

  show(run) { this.run = run; this.draw(); }

  // The collectives on their way at the clock; where there are none, the one that is pointed at, or was picked, or the
  // last before.
  calls() {
    const { calls } = this.run;
    const under = calls.filter((call) => call.steps.length && Math.min(...call.parts.map((part) => part.begun)) <= state.clock
      && state.clock < Math.max(...call.parts.map((part) => part.ended)));
    if (under.length) return under;
    const pointed = state.link?.part && state.link.call != null && calls[state.link.call];
    if (pointed?.steps.length && pointed.parts.includes(state.link.part)) return [pointed];
    const picked = state.pick?.side === this.side && thing()?.call;
    if (picked?.steps?.length) return [picked];
    const ended = (call) => Math.max(...call.parts.map((part) => part.ended));
    const before = calls.filter((call) => call.steps.length && ended(call) <= state.clock);
    const last = Math.max(...before.map(ended));
    return before.filter((call) => ended(call) === last);
  }

  draw() {
    if (!this.run) return;
    const { run } = this;
    const many = run.ranks.length;
    if (many > 16 || many < 2) {
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", "0 0 440 10");
      this.words.textContent = many < 2 ? "One rank sends nothing." : `A circle of ${many} ranks is too small to read; the timeline has their messages.`;
      this.said.textContent = "";
      return;
    }
    const calls = this.calls();
    const most = calls.length ? Math.max(...calls.map((call) => call.group.length)) : many; // of a mesh's groups, fewer than ranks
    const segment = most > 8 ? 3 : most > 4 ? 7 : many > 4 ? 11 : 15;
    const row = most > 8 ? 6 : most > 4 ? 9 : 18;
    const width = segment * most + 26;
    const height = row * most + 24;
    const [wide, high] = many > 4 ? [560, 540] : [440, 400];
    const [middleX, middleY] = [wide / 2, high / 2];
    const radius = [(wide - width) / 2 - 8, (high - height) / 2 - 6];
    const place = (rank) => {
      const angle = (2 * Math.PI * rank) / many - Math.PI / 2;
      return many === 2 ? [middleX + (rank ? radius[0] * 0.75 : -radius[0] * 0.75), middleY]
        : [middleX + radius[0] * Math.cos(angle), middleY + radius[1] * Math.sin(angle)];
    };
    this.svg.setAttribute("viewBox", many === 2 ? "0 120 440 160" : `0 0 ${wide} ${high}`);
    const boards = new Map();
    for (const call of calls) {
      const board = boardOf(call, state.clock);
      call.group.forEach((rank, member) => boards.set(rank, { call, chunks: board[member], member }));
    }
    const parts = [];
    for (const call of calls) {
      for (const hop of hopsOf(call).filter((one) => one.start <= state.clock && state.clock < one.end)) parts.push(...this.message(call, hop, place, segment, row));
    }
    const nodes = run.ranks.map((rank) => this.node(rank.rank, place(rank.rank), boards.get(rank.rank), { segment, row, width, height }));
    const circle = drawn("ellipse", { cx: middleX, cy: middleY, rx: radius[0], ry: radius[1], class: "circle" });
    this.svg.replaceChildren(...(many > 2 ? [circle] : []), ...parts.filter((one) => one.tagName === "path"), ...nodes, ...parts.filter((one) => one.tagName !== "path"));
    this.say(calls);
  }

  node(rank, [x, y], has, { segment, row, width, height }) {
    const [left, top] = [x - width / 2, y - height / 2];
    const group = drawn("g", { "data-rank": rank, class: `node${state.rank === rank ? " chosen" : ""}${isLit({ rank, what: "node" }) ? " lit" : ""}` });
    group.append(drawn("rect", { x: left, y: top, width, height, rx: 6, stroke: rankColor(rank), class: "frame" }),
      drawn("text", { x, y: top + 14, class: "name" }, `rank ${rank}`));
    const members = has ? has.call.group.length : 0;
    for (let chunk = 0; chunk < members; chunk += 1) {
      const at = top + 20 + chunk * row;
      group.append(...this.cell(left + 18, at, has.chunks[chunk], has.call.group, segment, row));
      if (row > 8) group.append(drawn("text", { x: left + 15, y: at + row / 2 + 3.5, class: row < 12 ? "chunk small" : "chunk" }, `c${chunk}`));
    }
    return group;
  }

  // A chunk: a segment for each addend, in its rank's color; a bold frame where it has all of them.
  cell(x, y, mask, group, segment, row) {
    const found = [];
    group.forEach((rank, member) => {
      if (!(mask >> member & 1)) return;
      found.push(drawn("rect", { x: x + member * segment, y: y + 1, width: segment - 0.5, height: row - 2, fill: rankColor(rank) }));
      if (segment > 9) found.push(drawn("text", { x: x + (member + 0.5) * segment, y: y + row / 2 + 3.5, class: "digit", fill: inkOn(rankColor(rank)) }, `${rank}`));
    });
    const full = mask === 2 ** group.length - 1;
    found.push(drawn("rect", { x: x - 0.5, y: y + 0.5, width: segment * group.length + 0.5, height: row - 1, class: full ? "cell full" : "cell" }));
    return found;
  }

  message(call, hop, place, segment, row) {
    const [from, to] = [place(call.group[hop.source]), place(call.group[hop.destination])];
    // Two that send to each other go by two ways; a message is seen between the boxes of its ends.
    const apart = call.group.length === 2 ? 0.2 : 0;
    const control = [(from[0] + to[0]) / 2 + (to[1] - from[1]) * apart, (from[1] + to[1]) / 2 - (to[0] - from[0]) * apart];
    const edge = this.run.ranks.length > 4 ? 0.45 : 0.36; // so that no name is under a message
    const share = edge + (1 - 2 * edge) * Math.min(1, Math.max(0, (state.clock - hop.start) / (hop.end - hop.start)));
    const at = [0, 1].map((axisOf) => (1 - share) ** 2 * from[axisOf] + 2 * share * (1 - share) * control[axisOf] + share ** 2 * to[axisOf]);
    const lit = state.link?.call === call.place ? " lit" : "";
    const found = [drawn("path", { d: `M${from}Q${control} ${to}`, stroke: purposeColor(call.purpose), class: `way${lit}`, "data-call": call.place })];
    const token = drawn("g", { class: `token${lit}`, "data-call": call.place });
    const shownChunks = hop.chunks.slice(0, 3);
    const width = segment * call.group.length;
    token.append(drawn("rect", { x: at[0] - width / 2 - 3, y: at[1] - (row * shownChunks.length) / 2 - 2, width: width + 6, height: row * shownChunks.length + 4, rx: 3, class: "back" }));
    shownChunks.forEach((_, number) => token.append(...this.cell(at[0] - width / 2, at[1] - (row * shownChunks.length) / 2 + number * row, hop.addends[number] ?? 0, call.group, segment, row)));
    const label = `${shownChunks.map((chunk) => `c${chunk}`).join(" ")}${hop.chunks.length > 3 ? " …" : ""} ${hop.chunks.length || !hop.nbytes ? "" : "message "}${shortBytes(hop.nbytes)}`;
    token.append(drawn("text", { x: at[0], y: at[1] + (row * shownChunks.length) / 2 + 13, class: "bytes" }, label));
    return [...found, token];
  }

  say(calls) {
    const [call] = calls;
    if (!call) {
      this.said.textContent = "nothing is on its way";
      this.words.textContent = "Press play, or step to the first message.";
      return;
    }
    const hops = hopsOf(call);
    const done = hops.filter((hop) => hop.end <= state.clock).length;
    const now = hops.filter((hop) => hop.start <= state.clock && state.clock < hop.end);
    const step = now.length ? now[now.length - 1].step + 1 : done === hops.length ? call.steps.length : 0;
    const groups = calls.length > 1 ? `; ${calls.length} groups at once` : "";
    this.said.textContent = `${hyphened(call.operation)}${call.unit ? ` of ${call.unit}` : ""}${groups}`;
    const where = done === hops.length ? "It is done." : step ? `Step ${step} of ${call.steps.length}.`
      : state.clock < Math.min(...call.parts.map((part) => part.begun)) ? "It has not begun."
      : done ? `${done} of ${hops.length} messages have come; the next waits for a rank.` : "It waits for a rank.";
    const adds = call.operation === "all_gather" ? "Each rank sends on the shards that it has: copies, no sums."
      : "Each rank adds its own to what comes, and sends it on; a bold frame has all addends.";
    this.words.textContent = `${where} ${call.operation === "all_gather" || call.operation.includes("reduce") ? adds : ""} For ${PURPOSE_MEANS[call.purpose] ?? call.purpose}, ${bytes(call.nbytes)} in ${call.group.length} chunks.`;
    this.svg.setAttribute("aria-label", `${this.said.textContent}. ${this.words.textContent}`);
  }
}
