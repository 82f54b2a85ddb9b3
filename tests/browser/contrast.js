// Gives the contrast of every visible text below an element with what is painted behind it.
root => {
  const parse = text => {
    const part = text.match(/[\d.]+/g);
    return part ? [+part[0], +part[1], +part[2], part.length > 3 ? +part[3] : 1] : [0, 0, 0, 0];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const linear = v => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const ground = element => {
    // Inside a picture the shape of the same group lies behind the words, else the first shape.
    if (element.ownerSVGElement) {
      const shape = element.parentNode.matches('g.cl-node')
        ? element.parentNode.querySelector('rect,polygon')
        : element.ownerSVGElement.querySelector('rect');
      return parse(getComputedStyle(shape).fill);
    }
    let colour = [255, 255, 255];
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.unshift(at);
    for (const at of layers) {
      const own = parse(getComputedStyle(at).backgroundColor);
      if (own[3] > 0) colour = over(own, colour);
    }
    return colour;
  };
  const found = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || element.closest('style,script,title,.cl-hidden')) continue;
    if (!element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue;
    const style = getComputedStyle(element), below = ground(element);
    const own = parse(element.ownerSVGElement ? style.fill : style.color);
    const [a, b] = [light(over(own, below)), light(below)].sort((x, y) => y - x);
    found.push({text: text.slice(0, 40), ratio: Math.round((a + 0.05) / (b + 0.05) * 100) / 100});
  }
  return found;
}
