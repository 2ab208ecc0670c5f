// The timeline: for each rank a lane of arithmetic, with its waits, one of messages, and one for each way of offload.
// The canvas is drawn anew when the run, the window or the light changes; the clock is a line of its own above it.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const GUTTER = 64; // for the names of ranks, of both canvases

// A canvas in the pixels of its screen, or three times as fine for paper.
function prepared(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const ratio = document.documentElement.dataset.paper ? 3 : devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const ink = canvas.getContext("2d");
  ink.scale(ratio, ratio);
  ink.font = "12px system-ui, sans-serif";
  ink.textBaseline = "middle";
  return { ink, width, x: scaleOf(width) };
}

function scaleOf(width) {
  const [low, high] = windowNow();
  const place = (clock) => GUTTER + ((clock - low) / (high - low)) * (width - GUTTER - 8);
  place.back = (pixel) => low + ((pixel - GUTTER) / (width - GUTTER - 8)) * (high - low);
  return place;
}

function hatched(ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = color("muted");
  pen.lineWidth = 1.2;
  pen.beginPath();
  pen.moveTo(-1, 7); pen.lineTo(7, -1);
  pen.stroke();
  return ink.createPattern(tile, "repeat");
}

const inkOn = (hex) => {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? "#ffffff" : "#000000";
};
const rankColor = (rank) => PAGE.ranks[rank % PAGE.ranks.length];
const purposeColor = (purpose) => PAGE.purposes[purpose] ?? PAGE.kindColors[purpose] ?? PAGE.purposes.unspecified;
const kindColor = (kind) => PAGE.kindColors[kind] ?? "#888888";

// Multiples of a power of ten, of twice or of five times it, at most so many.
function roundTicks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10(high - low));
  const size = [0.1, 0.2, 0.5, 1, 2, 5].map((part) => part * power).find((one) => (high - low) / one <= most);
  const first = Math.ceil(low / size);
  return Array.from({ length: Math.floor(high / size) - first + 1 }, (_, at) => (first + at) * size);
}

class Timeline {
  constructor(side, box) {
    this.side = side;
    box.innerHTML = `<h3>Timeline <small></small></h3>
      <div class="canvas" tabindex="0" role="application" aria-roledescription="timeline"><canvas></canvas><div class="cursor"></div></div>
      <ul class="keys"></ul>`;
    [this.said, this.holder, this.canvas, this.cursor, this.keys] = ["small", ".canvas", "canvas", ".cursor", ".keys"].map(
      (name) => box.querySelector(name));
    wireCanvas(this);
  }

  get laneHeight() { return this.run.ranks.length > 4 ? 13 : 17; }
  get lanes() { return ["compute", "communication", ...this.run.streams]; }
  get rankHeight() { return this.lanes.length * (this.laneHeight + 3) + 8; }

  show(run) {
    this.run = run;
    this.said.textContent = `${run.ranks.length === 1 ? "one rank" : `${run.ranks.length} ranks`}, ${micro(run.end)} in all; at most ${micro(Math.max(
      ...run.ranks.map((rank) => rank.waiting)))} of them a rank stands still for messages`;
    this.holder.setAttribute("aria-label", `Timeline of ${run.ranks.length} ranks: ${micro(run.end)}. Arrow keys step the clock, up and down choose a rank, Enter asks about it.`);
    const phases = new Set(run.ranks.flatMap((rank) => rank.computed.map((one) => one.phase)));
    const purposes = new Set(run.ranks.flatMap((rank) => rank.parts.map((part) => part.purpose)));
    this.keys.innerHTML = [...Object.entries(PAGE.phases).filter(([name]) => phases.has(name)).map(([name, hex]) =>
      `<li><i style="background:${hex}"></i>computes ${name}</li>`),
    ...[...purposes].map((name) => `<li><i style="background:${purposeColor(name)}"></i>${name in PAGE.purposes ? "sends" : "moves"} ${safe(spaced(name))}</li>`),
    run.ranks.some((rank) => rank.waits.length) ? '<li><i class="wait"></i>waits</li>' : ""].join("");
    this.draw();
  }

  draw() {
    if (!this.run) return;
    const { run, laneHeight, rankHeight } = this;
    const top = 22;
    const height = top + run.ranks.length * rankHeight + 22;
    const { ink, width, x } = prepared(this.canvas, height);
    Object.assign(this, { x, top });
    ink.save();
    ink.beginPath();
    ink.rect(GUTTER - 1, 0, width - GUTTER, height);
    ink.clip();
    this.phases(ink, x);
    const pattern = hatched(ink);
    run.ranks.forEach((rank, at) => {
      const low = top + at * rankHeight;
      for (const wait of rank.waits) this.bar(ink, wait, low, pattern, 0);
      for (const one of rank.computed) this.bar(ink, one, low, PAGE.phases[one.phase] ?? PAGE.phases["other arithmetic"], 0, one.unit);
      for (const part of rank.parts) this.part(ink, part, low);
    });
    ink.restore();
    this.frame(ink, x, width, height);
    this.moveCursor();
  }

  // The names of rank 0's outermost spans, above the lanes.
  phases(ink, x) {
    for (const phase of this.run.ranks[0]?.phases ?? []) {
      const [left, right] = [x(phase.start), x(phase.end)];
      if (right - left < 2) continue;
      ink.fillStyle = color("faint");
      ink.fillRect(left, 2, right - left - 1, 15);
      if (right - left > ink.measureText(phase.name).width + 6) {
        ink.fillStyle = color("ink");
        ink.fillText(phase.name, Math.max(left, GUTTER) + 4, 10);
      }
    }
  }

  lane(name) { return this.lanes.indexOf(name) * (this.laneHeight + 3); }

  bar(ink, one, low, fill, lane, words = "") {
    const { x, laneHeight } = this;
    const [left, right] = [x(one.start), x(one.end)];
    if (right < GUTTER || left > this.canvas.clientWidth) return;
    const size = Math.max(1, right - left - 0.6);
    const whole = one.link ?? one; // of a part, what is drawn here is its end
    ink.globalAlpha = state.link && !isLit(whole) ? 0.32 : 1;
    ink.fillStyle = fill;
    ink.fillRect(left, low + lane, size, laneHeight);
    if (typeof fill === "string" && words && size > ink.measureText(words).width + 5) {
      ink.fillStyle = inkOn(fill);
      ink.fillText(words, Math.max(left, GUTTER) + 3, low + lane + laneHeight / 2 + 1);
    }
    if (whole === one && (isLit(one) || thing() === one)) this.outline(ink, left, low + lane, size, thing() === one);
    ink.globalAlpha = 1;
  }

  outline(ink, left, top, size, strong) {
    ink.strokeStyle = color("ink");
    ink.lineWidth = strong ? 2.5 : 1.5;
    ink.strokeRect(left, top, size, this.laneHeight);
  }

  // A part in a collective: from its issue a line under the lane, until the last rank has come pale, then in full color.
  part(ink, part, low) {
    const { x, laneHeight } = this;
    const lane = this.lane(part.stream);
    const fill = purposeColor(part.purpose);
    if (part.begun > part.issued) {
      ink.fillStyle = fill;
      ink.fillRect(x(part.issued), low + lane + laneHeight + 0.5, x(part.begun) - x(part.issued), 2);
    }
    if (part.joined > part.begun) {
      ink.globalAlpha = state.link && !isLit(part) ? 0.12 : 0.35;
      ink.fillStyle = fill;
      ink.fillRect(x(part.begun), low + lane, x(part.joined) - x(part.begun), laneHeight);
      ink.globalAlpha = 1;
    }
    const unit = part.call?.unit;
    this.bar(ink, { ...part, start: part.joined, link: part }, low, fill, lane, unit || (part.call ? "" : part.name));
    if (isLit(part) || thing() === part) this.outline(ink, x(part.begun), low + lane, Math.max(1, x(part.ended) - x(part.begun)), thing() === part);
  }

  frame(ink, x, width, height) {
    const { run, top, rankHeight } = this;
    run.ranks.forEach((rank, at) => {
      const low = top + at * rankHeight;
      nameRank(ink, rank.rank, low + (rankHeight - 9) / 2);
      ink.strokeStyle = color("faint");
      ink.lineWidth = 1;
      ink.strokeRect(GUTTER - 0.5, low - 1.5, width - GUTTER - 7, rankHeight - 6);
    });
    axis(ink, x, width, height);
  }

  moveCursor() { placeCursor(this); }

  hit(pixelX, pixelY) {
    const at = Math.floor((pixelY - this.top) / this.rankHeight);
    const rank = this.run.ranks[at];
    if (!rank) return null;
    const clock = this.x.back(pixelX);
    const lane = this.lanes[Math.floor((pixelY - this.top - at * this.rankHeight) / (this.laneHeight + 3))];
    const reach = (this.x.back(1) - this.x.back(0)) * (matchMedia("(pointer: coarse)").matches ? 8 : 2); // a finger's is wider
    const near = (ones) => ones.find((one) => one.start <= clock && clock < one.end)
      ?? ones.find((one) => one.start - reach <= clock && clock < one.end + reach);
    if (pixelX < GUTTER) return { what: "rank", rank: rank.rank };
    if (lane === "compute") return near(rank.computed) ?? near(rank.waits) ?? null;
    return near(rank.parts.filter((part) => part.stream === lane)) ?? null;
  }
}

function nameRank(ink, rank, middle) {
  const lit = state.rank === rank;
  ink.fillStyle = rankColor(rank);
  ink.beginPath();
  ink.arc(9, middle, 5, 0, 7);
  ink.fill();
  ink.fillStyle = color("ink");
  ink.font = `${lit ? "700" : "400"} 12px system-ui, sans-serif`;
  ink.fillText(`rank ${rank}`, 18, middle + 1);
  ink.font = "12px system-ui, sans-serif";
}

function axis(ink, x, width, height) {
  ink.fillStyle = color("muted");
  ink.strokeStyle = color("muted");
  const ticks = roundTicks(...windowNow(), Math.max(2, Math.min(10, (width - GUTTER) / 52)));
  const digits = ticks.length > 1 ? Math.max(0, -Math.floor(Math.log10((ticks[1] - ticks[0]) / 1e3 + 1e-12))) : 0;
  ticks.forEach((tick, at) => {
    const left = x(tick);
    ink.fillRect(left, height - 20, 1, 5);
    const words = `${(tick / 1e3).toLocaleString("en-US", { maximumFractionDigits: digits })}${at === ticks.length - 1 || at === 0 ? " µs" : ""}`;
    if (left + ink.measureText(words).width < width) ink.fillText(words, left + 3, height - 9);
  });
}

// What both canvases have in common: the cursor, dragging the clock, pointing, clicking, keys.
function placeCursor(view) {
  if (!view.x) return;
  const left = view.x(Math.min(state.clock, lastEnd()));
  view.cursor.style.left = `${left}px`;
  view.cursor.hidden = left < GUTTER - 1;
}

function wireCanvas(view) {
  const { holder } = view;
  const at = (event) => { const box = view.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  let pressed = null;
  holder.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pressed = { x: event.clientX, moved: false };
    holder.setPointerCapture(event.pointerId);
  });
  holder.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (pressed && (pressed.moved || Math.abs(event.clientX - pressed.x) > 4)) {
      pressed.moved = true;
      play(false);
      setClock(view.x.back(x));
    } else if (!pressed) {
      const one = view.hit(x, y);
      setLink(one?.what === "rank" ? { rank: one.rank } : linkOf(one));
      holder.title = one && ANSWERS[one.what] ? ANSWERS[one.what](view.run, one)[0] : "";
    }
  });
  holder.addEventListener("pointerup", (event) => {
    const [x, y] = at(event);
    if (pressed && !pressed.moved) {
      const one = view.hit(x, y);
      play(false);
      if (x >= GUTTER) setClock(one && one.born === one.died && one.what === "array" ? one.born : view.x.back(x));
      if (one?.what === "rank") setRank(one.rank); else if (one) pick(view.side, one);
    }
    pressed = null;
  });
  holder.addEventListener("pointercancel", () => { pressed = null; }); // the finger scrolls the page
  holder.addEventListener("pointerleave", () => setLink(null));
  holder.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomBy(event.deltaY < 0 ? 1.25 : 0.8, view.x.back(at(event)[0]));
  }, { passive: false });
  holder.addEventListener("keydown", (event) => {
    const ranks = view.run.ranks.length;
    if (event.key === "ArrowUp") setRank((state.rank + ranks - 1) % ranks);
    else if (event.key === "ArrowDown") setRank((state.rank + 1) % ranks);
    else if (event.key === "Enter") (view instanceof Memory ? askByte : askRank)(view.side);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

function setRank(rank) {
  state.rank = rank;
  changed("rank");
  writeAddress();
}
