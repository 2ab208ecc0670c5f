"use strict";
// Walks, zooms and explains. Everything that it shows stands in the page already.
(() => {
  const scroller = document.getElementById("zoomed");
  const said = document.getElementById("said");
  const lanes = [...document.querySelectorAll(".lane")].map((lane) => [...lane.children].sort(
    (a, b) => a.dataset.start - b.dataset.start));
  let current = null;
  let zoom = 1;

  const laneOf = (bar) => lanes.findIndex((bars) => bars.includes(bar));

  function explain(bar) {
    said.textContent = `${bar.parentElement.getAttribute("aria-label")}: ${bar.getAttribute("aria-label")}`;
    document.querySelectorAll(".same").forEach((other) => other.classList.remove("same"));
    if (bar.dataset.call !== undefined) {
      document.querySelectorAll(`[data-call="${bar.dataset.call}"]`).forEach((one) => one.classList.add("same"));
    }
  }

  function go(bar) {
    if (!bar) return;
    if (current) current.tabIndex = -1;
    current = bar;
    current.tabIndex = 0;
    current.focus();
    explain(current);
  }

  function nearest(lane, time) {
    let best = null;
    for (const bar of lanes[lane] ?? []) {
      if (best === null || Math.abs(bar.dataset.start - time) < Math.abs(best.dataset.start - time)) best = bar;
    }
    return best;
  }

  function upOrDown(bar, way) {
    for (let lane = laneOf(bar) + way; lane >= 0 && lane < lanes.length; lane += way) {
      if (lanes[lane].length) return nearest(lane, bar.dataset.start);
    }
    return null;
  }

  function zoomTo(factor) {
    const middle = (scroller.scrollLeft + scroller.clientWidth / 2) / scroller.scrollWidth;
    zoom = Math.min(64, Math.max(1, factor));
    document.documentElement.style.setProperty("--zoom", zoom);
    if (current && document.activeElement === current) current.scrollIntoView({ inline: "center", block: "nearest" });
    else scroller.scrollLeft = middle * scroller.scrollWidth - scroller.clientWidth / 2;
  }

  const keys = {
    ArrowRight: (bars, at) => go(bars[at + 1]),
    ArrowLeft: (bars, at) => go(bars[at - 1]),
    ArrowDown: (bars, at) => go(upOrDown(bars[at], 1)),
    ArrowUp: (bars, at) => go(upOrDown(bars[at], -1)),
    Home: (bars) => go(bars[0]),
    End: (bars) => go(bars[bars.length - 1]),
    "+": () => zoomTo(zoom * 2),
    "=": () => zoomTo(zoom * 2),
    "-": () => zoomTo(zoom / 2),
    "0": () => zoomTo(1),
  };

  scroller.addEventListener("keydown", (event) => {
    const bars = lanes[laneOf(event.target)];
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey || (!bars && !"+=-0".includes(event.key))) return;
    act(bars, bars ? bars.indexOf(event.target) : -1);
    event.preventDefault();
  });
  scroller.addEventListener("focusin", (event) => { if (laneOf(event.target) >= 0) { current = event.target; explain(current); } });
  scroller.addEventListener("mouseover", (event) => { if (laneOf(event.target) >= 0) explain(event.target); });
  scroller.addEventListener("click", (event) => { if (laneOf(event.target) >= 0) go(event.target); });
  document.getElementById("in").addEventListener("click", () => zoomTo(zoom * 2));
  document.getElementById("out").addEventListener("click", () => zoomTo(zoom / 2));
  document.getElementById("all").addEventListener("click", () => zoomTo(1));

  // One bar is reached by Tab; from there on the arrows walk.
  const first = lanes.find((bars) => bars.length);
  if (first) { current = first[0]; current.tabIndex = 0; }

  // What is folded away is on paper too.
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((one) => { one.open = true; });
  });
  window.addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));

  document.documentElement.dataset.ready = String(lanes.reduce((sum, bars) => sum + bars.length, 0));
})();
