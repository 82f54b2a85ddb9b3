// The browser module of the lens: zoom, drag, keyboard and a click on the picture.
// It reads and marks what Python drew; all facts and links are in the elements' own attributes.
(() => {
  'use strict';
  const RULE = '%RULE%';
  const ARROWS = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};
  const calm = matchMedia('(prefers-reduced-motion: reduce)');

  function start(root) {
    if (root.dataset.started) return;
    root.dataset.started = 'yes';
    let zoom = 1, drag = null, shown = '', step = null;
    // No two pages on one kernel may count alike: an unchanged field tells Python nothing.
    let said = Date.now();

    const all = (query, inside = root) => [...inside.querySelectorAll(query)];
    const graph = () => root.querySelector('.cl-graph');
    const group = item => item.closest('svg,tbody,pre,ol');
    const peers = item => all('[data-id]', group(item));

    // What the user did goes to Python through a hidden field, which is a widget of its own.
    function tell(keys) {
      const field = root.querySelector('.cl-wire input');
      if (!field) return;
      field.value = `${++said} ${keys}`;
      for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}));
    }

    // The marks are a style rule, so one element marks every pane, also while Python is busy.
    // Python writes the same rule: what is chosen is read from it and kept nowhere else.
    const marks = () => root.querySelector('.cl-marks');
    const chosen = () => [...new Set([...(marks()?.textContent ?? '').matchAll(/~="(\w+)"/g)].map(
      found => found[1]))].join(' ');
    const selectors = keys => keys.split(' ').filter(Boolean).map(
      key => `[data-k~="${key}"]`).join(',');

    function choose(keys) {
      if (marks()) marks().textContent = keys ? RULE.replaceAll('%SEL%', selectors(keys)) : '';
      reveal();
      tell(keys);
    }

    function reveal() {
      const keys = chosen(), list = selectors(keys), isNew = keys !== shown;
      shown = keys;
      for (const item of all('[data-id]')) {
        const on = Boolean(list) && item.matches(list);
        if (item.matches('tr,g')) item.setAttribute(item.matches('tr') ? 'aria-selected' : 'aria-pressed', on);
        const box = item.closest('.cl-scroll');
        if (on && isNew && box && item.matches('g') && !item.contains(document.activeElement)) centre(box, item);
      }
    }

    // Scrolls the pane only: the page stays where the reader has it.
    function centre(box, item, now = false, beside = item) {
      const a = box.getBoundingClientRect(), one = item.getBoundingClientRect();
      const two = beside.getBoundingClientRect();
      const b = {left: Math.min(one.left, two.left), right: Math.max(one.right, two.right),
        top: Math.min(one.top, two.top), bottom: Math.max(one.bottom, two.bottom)};
      if (b.top >= a.top && b.bottom <= a.bottom && b.left >= a.left && b.right <= a.right) return;
      box.scrollBy({
        left: (b.left + b.right - a.left - a.right) / 2,
        top: (b.top + b.bottom - a.top - a.bottom) / 2,
        behavior: now || calm.matches ? 'instant' : 'smooth',
      });
    }

    function scale(factor) {
      const box = graph(), svg = box && box.querySelector('svg');
      if (!svg) return;
      svg.dataset.width ||= svg.getBoundingClientRect().width;
      const before = svg.getBoundingClientRect(), frame = box.getBoundingClientRect();
      const x = (frame.left + box.clientWidth / 2 - before.left) / before.width;
      const y = (frame.top + box.clientHeight / 2 - before.top) / before.height;
      zoom = factor ? Math.min(Math.max(zoom * factor, 0.4), 4) : 1;
      svg.style.maxWidth = zoom === 1 ? '' : 'none';
      svg.style.width = zoom === 1 ? '' : `${svg.dataset.width * zoom}px`;
      const after = svg.getBoundingClientRect();
      box.scrollBy(after.left + x * after.width - frame.left - box.clientWidth / 2,
        after.top + y * after.height - frame.top - box.clientHeight / 2);
    }

    // Adds what only makes sense with a module: again after each time that Python draws anew.
    function enhance() {
      for (const item of all('[data-id]')) {
        if (item.hasAttribute('tabindex')) continue;
        const first = peers(item)[0] === item;
        item.setAttribute('tabindex', first ? 0 : -1);
        // JupyterLab would take the arrow keys for its cells.
        item.setAttribute('data-lm-suppress-shortcuts', 'true');
        if (item.matches('g')) item.setAttribute('role', 'button');
      }
      const box = graph(), svg = box && box.querySelector('svg');
      if (svg && svg.getAttribute('role') === 'img') {
        svg.setAttribute('role', 'group');
        if (!root.querySelector('.cl-zoom')) box.closest('.cl-pane').append(zoomer());
        zoom = 1;
        const failed = svg.querySelector('.cl-node-failed');
        if (failed) peers(failed).forEach(item => item.setAttribute('tabindex', item === failed ? 0 : -1));
        // In the first view lies what failed, and what it was given that is bad.
        const bad = svg.querySelector('.cl-node-bad_input');
        if (failed) centre(box, failed, true);
        if (bad) centre(box, bad, true, failed || bad);
      }
      for (const item of all('.cl-fix,[data-copy]')) {
        if (item.dataset.ready) continue;
        item.dataset.ready = 'yes';
        if (item.matches('pre')) item.before(copier(item));
        else (item.closest('.cl-try') || item.parentNode).append(copier(item));
      }
      reveal();
    }

    function button(label, tip, act) {
      const made = document.createElement('button');
      made.type = 'button';
      made.textContent = label;
      made.title = tip;
      made.setAttribute('aria-label', tip);
      made.setAttribute('data-lm-suppress-shortcuts', 'true');
      made.addEventListener('click', act);
      return made;
    }

    function zoomer() {
      const bar = document.createElement('div');
      bar.className = 'cl-zoom';
      bar.append(button('−', 'zoom out', () => scale(0.8)), button('+', 'zoom in', () => scale(1.25)),
        button('Fit', 'fit the picture into its pane', () => scale(0)));
      return bar;
    }

    function copier(source) {
      const made = button('Copy', 'copy to the clipboard', async () => {
        const text = source.textContent;
        try {
          await navigator.clipboard.writeText(text);
        } catch {
          // Pages that are not served securely have the old way only.
          const area = document.createElement('textarea');
          area.value = text;
          made.after(area);
          area.select();
          document.execCommand('copy');
          area.remove();
        }
        made.textContent = 'Copied';
        setTimeout(() => { made.textContent = 'Copy'; }, 1500);
      });
      made.className = 'cl-copy';
      return made;
    }

    function focus(item) {
      peers(item).forEach(other => other.setAttribute('tabindex', other === item ? 0 : -1));
      item.focus({preventScroll: true});
      const box = item.closest('.cl-scroll');
      if (box) centre(box, item);
    }

    // In tables and code the next thing; in the picture the nearest one in that direction.
    function next(item, [dx, dy]) {
      const items = peers(item);
      if (!item.matches('g')) return items[items.indexOf(item) + (dx + dy)];
      const spot = other => {
        const box = other.getBoundingClientRect();
        return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
      };
      const [x, y] = spot(item);
      const ranked = items.filter(other => other !== item).map(other => {
        const [px, py] = spot(other);
        const along = (px - x) * dx + (py - y) * dy;
        const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
        return {other, along, cost: along + 2 * aside};
      }).filter(entry => entry.along > 4).sort((a, b) => a.cost - b.cost);
      return ranked.length ? ranked[0].other : undefined;
    }

    function onKey(event) {
      const item = event.target.closest && event.target.closest('[data-id]');
      if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
      const acts = {
        Enter: () => choose(item.dataset.id),
        ' ': () => choose(item.dataset.id),
        Escape: () => choose(''),
        '+': () => scale(1.25),
        '-': () => scale(0.8),
        0: () => scale(0),
      };
      if (ARROWS[event.key]) {
        // The way back is the way there, whatever lies nearer now.
        const [dx, dy] = ARROWS[event.key];
        const isBack = step?.to === item && step.dx === -dx && step.dy === -dy && step.from.isConnected;
        const other = isBack ? step.from : next(item, [dx, dy]);
        if (other) {
          step = {from: item, to: other, dx, dy};
          focus(other);
        }
      } else if (acts[event.key]) {
        acts[event.key]();
      } else {
        return;
      }
      event.preventDefault();
      event.stopPropagation();
    }

    root.addEventListener('keydown', onKey);
    root.addEventListener('click', event => {
      const item = event.target.closest('[data-id]');
      if (!item || drag === 'moved') return;
      focus(item);
      choose(item.dataset.id === chosen() ? '' : item.dataset.id);
    });
    root.addEventListener('pointerdown', event => {
      const box = event.target.closest('.cl-graph');
      drag = box && event.button === 0 && event.pointerType === 'mouse'
        ? {box, x: event.clientX, y: event.clientY, left: box.scrollLeft, top: box.scrollTop} : null;
    });
    root.addEventListener('pointermove', event => {
      if (!drag || !drag.box || !event.buttons) return;
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 5) return;
      drag.moved = true;
      drag.box.classList.add('cl-dragged');
      drag.box.scrollTo(drag.left - dx, drag.top - dy);
    });
    root.addEventListener('pointerup', () => {
      if (!drag || !drag.box) return;
      drag.box.classList.remove('cl-dragged');
      // The click that ends a drag chooses nothing.
      drag = drag.moved ? 'moved' : null;
    });
    root.addEventListener('wheel', event => {
      if (!event.ctrlKey || !event.target.closest('.cl-graph')) return;
      event.preventDefault();
      scale(event.deltaY < 0 ? 1.1 : 0.9);
    }, {passive: false});
    new MutationObserver(enhance).observe(root, {childList: true, subtree: true});
    enhance();
  }

  // The views of one bundle come up in any order.
  let tries = 0;
  const look = () => {
    const roots = document.querySelectorAll('.%ROOT%');
    roots.forEach(start);
    if (!roots.length && ++tries < 100) setTimeout(look, 100);
  };
  look();
})();
