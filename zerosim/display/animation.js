"use strict";
// Shows one picture at a time. Without it the page shows all of them, one under the other.
(() => {
  const images = [...document.querySelectorAll("img")];
  const tools = document.getElementById("tools");
  const at = document.getElementById("at");
  const play = document.getElementById("play");
  let timer = null;
  function show(number) {
    const now = (number + images.length) % images.length;
    images.forEach((image, index) => { image.hidden = index !== now; });
    at.value = now;
    document.getElementById("said").textContent = `${now + 1} of ${images.length}`;
  }
  function stop() { clearInterval(timer); timer = null; play.textContent = "play"; }
  document.getElementById("back").addEventListener("click", () => { stop(); show(Number(at.value) - 1); });
  document.getElementById("on").addEventListener("click", () => { stop(); show(Number(at.value) + 1); });
  at.addEventListener("input", () => { stop(); show(Number(at.value)); });
  play.addEventListener("click", () => {
    if (timer !== null) { stop(); return; }
    play.textContent = "stop";
    timer = setInterval(() => show(Number(at.value) + 1), Number(tools.dataset.milliseconds));
  });
  tools.hidden = false;
  show(0);
  document.documentElement.dataset.ready = String(images.length);
})();
