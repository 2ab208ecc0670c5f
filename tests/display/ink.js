const ratio = (a, b) => { const lum = (text) => { const [r, g, b] = text.match(/[\d.]+/g).map((v) => Number(v) / 255)
  .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const [low, high] = [lum(a), lum(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
const paperOf = (one) => { const paper = getComputedStyle(one).backgroundColor;
  return paper === "rgba(0, 0, 0, 0)" && one.parentElement ? paperOf(one.parentElement) : paper; };
const inks = () => {
  const read = [...document.querySelectorAll("h1,h3,small,p,td,th,dt,dd,summary,button,legend,caption,.settings span,#answer")]
    .filter((one) => one.textContent.trim() && one.checkVisibility() && !one.closest(":disabled"));
  document.documentElement.dataset.page = getComputedStyle(document.body).backgroundColor;
  document.documentElement.dataset.worst = Math.min(...read.map((one) => ratio(getComputedStyle(one).color, paperOf(one))));
  document.documentElement.dataset.wide = document.documentElement.scrollWidth - innerWidth;
};
new MutationObserver(inks).observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
