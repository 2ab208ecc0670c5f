const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const seen = [];
const here = () => { const bar = document.activeElement;
  seen.push([bar.parentElement.getAttribute("aria-label"), bar.dataset.start, bar.tabIndex].join("|")); };
document.querySelector('[role=listitem][tabindex="0"]').focus(); here();
for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowUp", "End", "Home"]) {
  press(key); here();
}
press("+"); press("+");
const root = document.documentElement;
root.dataset.zoom = getComputedStyle(root).getPropertyValue("--zoom");
press("0");
root.dataset.back = getComputedStyle(root).getPropertyValue("--zoom");
root.dataset.seen = seen.join("\n");
root.dataset.said = document.getElementById("said").textContent;
root.dataset.tabs = document.querySelectorAll('[role=listitem][tabindex="0"]').length;
document.querySelector('.communication .bar[data-call="2"]').click();
root.dataset.same = document.querySelectorAll(".same").length;
