const ratio = (a, b) => { const lum = (text) => { const [r, g, b] = text.match(/[\d.]+/g).map((v) => Number(v) / 255)
  .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const [low, high] = [lum(a), lum(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
const page = getComputedStyle(document.body).backgroundColor;
const worst = Math.min(...[...document.querySelectorAll("h1,p,td,th,dt,dd,summary,button,.axis span,.scale span")]
  .map((one) => ratio(getComputedStyle(one).color, page)));
document.documentElement.dataset.page = page;
document.documentElement.dataset.worst = worst;
document.documentElement.dataset.wide = document.documentElement.scrollWidth - innerWidth;
