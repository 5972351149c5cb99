/* Copyright: kubenode.proxy contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Filters, orders and colours the page and shows details; without it the page still shows everything that matters.
 * Text from nodes enters the document as text content only, never as markup. */
(function () {
  'use strict';
  var data = JSON.parse(document.getElementById('fleet-data').textContent);
  var nodes = data.nodes, letters = data.letters, words = data.words;
  var byId = function (id) { return document.getElementById(id); };
  var cells = [], rows = [];
  document.querySelectorAll('#matrix > li').forEach(function (item) { cells.push(item); });
  document.querySelectorAll('#rows > tr').forEach(function (row) { rows.push(row); });
  var filter = byId('filter'), order = byId('order'), colour = byId('colour'), shown = byId('shown');
  var panel = byId('panel'), legend = byId('legend'), empty = byId('nothing'), tip = byId('tip');
  var pressed = {}, current = -1, roving = 0, sequence = nodes.map(function (_node, index) { return index; });
  var descending = false;
  document.documentElement.classList.add('js');

  function make(tag, name, text) {
    var element = document.createElement(tag);
    if (name) { element.className = name; }
    if (text !== undefined && text !== null) { element.textContent = text; }
    return element;
  }
  function number(value) { return value === null || value === undefined ? '' : value.toLocaleString('en-US'); }
  function badge(kind) { return make('span', 'badge s-' + kind, letters[kind]); }

  var hay = nodes.map(function (node) {
    var parts = [node.name, node.node_name, node.mode, node.engine, node.kernel, node.distribution, words[node.state]];
    node.reasons.forEach(function (reason) { parts.push(words[reason[0]], reason[1], reason[2]); });
    return parts.join(' ').toLowerCase();
  });

  // -- what the colours mean --
  var groups = {
    state: function (node) { return node.state; },
    mode: function (node) { return node.mode || 'unknown'; },
    engine: function (node) { return node.engine || 'none'; },
    kernel: function (node) { return node.kernel || 'unknown'; },
    distribution: function (node) { return node.distribution || 'unknown'; }
  };
  function categories() {
    var by = colour.value, counts = {};
    nodes.forEach(function (node) { var key = groups[by](node); counts[key] = (counts[key] || 0) + 1; });
    var keys = Object.keys(counts);
    if (by === 'state') {
      keys = data.states.filter(function (state) { return counts[state]; });
    } else {
      keys.sort(function (a, b) { return counts[b] - counts[a] || (a < b ? -1 : 1); });
    }
    var found = {};
    keys.forEach(function (key, index) {
      found[key] = by === 'state'
        ? { look: 's-' + key, letter: letters[key], label: words[key], count: counts[key] }
        : key === 'unknown' || key === 'none'
          ? { look: 'k8', letter: '?', label: key, count: counts[key] }
          : { look: 'k' + Math.min(index, 7), letter: index < 25 ? String.fromCharCode(97 + index) : '+',
              label: key, count: counts[key] };
    });
    return { keys: keys, found: found };
  }
  function paint() {
    var by = colour.value, all = categories();
    pressed = {};
    legend.textContent = '';
    all.keys.forEach(function (key) {
      var entry = all.found[key], item = make('li'), chip = make('button', 'chip');
      chip.type = 'button';
      chip.setAttribute('aria-pressed', 'false');
      chip.appendChild(make('span', 'badge ' + entry.look, entry.letter));
      chip.appendChild(make('span', '', entry.label));
      chip.appendChild(make('b', '', number(entry.count)));
      chip.addEventListener('click', function () {
        if (pressed[key]) { delete pressed[key]; } else { pressed[key] = true; }
        chip.setAttribute('aria-pressed', String(Boolean(pressed[key])));
        apply();
      });
      item.appendChild(chip);
      legend.appendChild(item);
    });
    nodes.forEach(function (node, index) {
      var entry = all.found[groups[by](node)], link = cells[index].firstElementChild;
      link.className = 'cell ' + entry.look;
      link.textContent = entry.letter;
    });
    apply();
  }

  // -- filter and order --
  function visible(index) { return !cells[index].hidden; }
  function apply() {
    var tokens = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    var only = Object.keys(pressed), by = groups[colour.value], count = 0;
    nodes.forEach(function (node, index) {
      var good = tokens.every(function (token) { return hay[index].indexOf(token) >= 0; }) &&
        (!only.length || pressed[by(node)] === true);
      cells[index].hidden = !good;
      rows[index].hidden = !good;
      count += good ? 1 : 0;
    });
    shown.textContent = count === nodes.length ? number(count) + ' nodes'
      : number(count) + ' of ' + number(nodes.length) + ' nodes';
    empty.hidden = count > 0;
    if (!visible(roving)) {
      var first = sequence.filter(visible)[0];
      if (first !== undefined) { rove(first); }
    }
  }
  var keys = {
    name: function (index) { return index; },
    state: function (index) { return data.states.indexOf(nodes[index].state); },
    mode: function (index) { return nodes[index].mode; },
    services: function (index) { return nodes[index].services; },
    service_ports: function (index) { return nodes[index].service_ports; },
    endpoints: function (index) { return nodes[index].endpoints; },
    drift: function (index) { return nodes[index].drift_entries; },
    refused: function (index) { return nodes[index].refused_count; },
    sync: function (index) { return nodes[index].age; },
    engine: function (index) { return nodes[index].engine; },
    kernel: function (index) { return nodes[index].kernel; },
    distribution: function (index) { return nodes[index].distribution; }
  };
  function arrange(column, down) {
    var key = keys[column], sign = down ? -1 : 1;
    descending = down;
    sequence = nodes.map(function (_node, index) { return index; });
    sequence.sort(function (a, b) {
      var one = key(a), two = key(b);
      var none = (one === null || one === '') - (two === null || two === '');
      if (none) { return none; }
      return one === two ? a - b : (one < two ? -sign : sign);
    });
    var list = byId('matrix'), body = byId('rows');
    sequence.forEach(function (index) { list.appendChild(cells[index]); body.appendChild(rows[index]); });
    document.querySelectorAll('th[data-key]').forEach(function (head) {
      if (head.dataset.key === column) {
        head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      } else {
        head.removeAttribute('aria-sort');
      }
    });
    order.value = column;
  }
  var largest = { services: 1, service_ports: 1, endpoints: 1, drift: 1, refused: 1, sync: 1 };
  order.addEventListener('change', function () { arrange(order.value, Boolean(largest[order.value])); });
  document.querySelectorAll('th[data-key]').forEach(function (head) {
    var button = make('button', '', head.textContent);
    button.type = 'button';
    head.textContent = '';
    head.appendChild(button);
    button.addEventListener('click', function () {
      var column = head.dataset.key;
      arrange(column, order.value === column ? !descending : Boolean(largest[column]));
    });
  });
  filter.addEventListener('input', apply);
  colour.addEventListener('change', paint);

  // -- details of one node --
  function pair(list, name, value, mono) {
    if (value === '' || value === null || value === undefined) { return; }
    list.appendChild(make('dt', '', name));
    list.appendChild(make('dd', mono ? 'mono' : '', value));
  }
  function small(title, heads, lines) {
    panel.appendChild(make('h4', '', title));
    var table = make('table'), head = make('thead'), body = make('tbody'), line = make('tr');
    heads.forEach(function (text) { var cell = make('th', '', text); cell.scope = 'col'; line.appendChild(cell); });
    head.appendChild(line);
    lines.forEach(function (values) {
      var row = make('tr');
      values.forEach(function (value, index) {
        var cell = make(index ? 'td' : 'th', '', index ? number(value) : value);
        if (!index) { cell.scope = 'row'; }
        row.appendChild(cell);
      });
      body.appendChild(row);
    });
    table.appendChild(head);
    table.appendChild(body);
    panel.appendChild(table);
  }
  function show(index) {
    var node = nodes[index];
    if (current >= 0) {
      cells[current].firstElementChild.removeAttribute('aria-current');
      rows[current].classList.remove('current');
    }
    current = index;
    cells[index].firstElementChild.setAttribute('aria-current', 'true');
    rows[index].classList.add('current');
    panel.textContent = '';
    var head = make('div', 'head');
    head.appendChild(badge(node.state));
    head.appendChild(make('h3', '', node.name));
    panel.appendChild(head);
    var list = make('ul');
    node.reasons.forEach(function (reason) {
      var item = make('li');
      item.appendChild(badge(reason[0]));
      item.appendChild(document.createTextNode((reason[1] ? reason[1] + ': ' : '') + reason[2]));
      list.appendChild(item);
    });
    if (!node.reasons.length) { list.appendChild(make('li', '', 'Nothing to complain about.')); }
    panel.appendChild(list);
    var facts = make('dl');
    pair(facts, 'Node object', node.node_name === node.name ? '' : node.node_name);
    pair(facts, 'Mode', node.mode + (node.mode_reason ? ' (' + node.mode_reason + ')' : ''));
    pair(facts, 'iptables', node.variant);
    pair(facts, 'Families', node.families.join(', '));
    pair(facts, 'Services', number(node.services));
    pair(facts, 'Ports', number(node.service_ports));
    pair(facts, 'Endpoints', number(node.endpoints));
    pair(facts, 'Refused', node.refused_count ? number(node.refused_count) + ' objects' : '');
    pair(facts, 'Agent', node.agent);
    pair(facts, 'Last sync', node.last_sync);
    pair(facts, 'Repaired', node.repaired ? number(node.repaired) + ' entries' : '');
    pair(facts, 'Engine', node.engine, true);
    pair(facts, 'Kernel', node.kernel, true);
    pair(facts, 'System', node.distribution);
    panel.appendChild(facts);
    if (node.changes.length) { small('Drift', ['Table', 'missing', 'different', 'unexpected'], node.changes); }
    if (node.programmed.length) { small('Programmed', ['Table', 'entries'], node.programmed); }
    panel.scrollTop = 0;
  }
  function clear() {
    if (current >= 0) {
      cells[current].firstElementChild.removeAttribute('aria-current');
      rows[current].classList.remove('current');
    }
    current = -1;
    panel.textContent = '';
    panel.appendChild(make('p', 'soft', 'Choose a node in the matrix or the table to see what is known of it.'));
  }
  document.addEventListener('click', function (event) {
    var link = event.target.closest ? event.target.closest('a[data-node]') : null;
    if (!link) { return; }
    event.preventDefault();
    var index = Number(link.dataset.node);
    show(index);
    if (!link.closest('#matrix')) {
      if (!visible(index)) { filter.value = ''; paint(); }
      rove(index);
      byId('nodes').scrollIntoView();
      cells[index].firstElementChild.focus({ preventScroll: true });
    } else {
      rove(index);
    }
  });

  // -- the matrix by keyboard: one stop of the tabulator, arrows inside --
  function rove(index) {
    cells[roving].firstElementChild.tabIndex = -1;
    roving = index;
    cells[index].firstElementChild.tabIndex = 0;
  }
  byId('matrix').addEventListener('keydown', function (event) {
    var seen = sequence.filter(visible), place = seen.indexOf(roving), next = place;
    var width = 1, top = cells[seen[0]] ? cells[seen[0]].offsetTop : 0;
    while (width < seen.length && cells[seen[width]].offsetTop === top) { width += 1; }
    var step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width }[event.key];
    if (step) { next = place + step; }
    if (event.key === 'Home') { next = 0; }
    if (event.key === 'End') { next = seen.length - 1; }
    if (event.key === ' ') { event.preventDefault(); show(roving); }
    if (event.key === 'Escape') { clear(); hide(); }
    if (next === place || next < 0 || next >= seen.length) {
      if (step) { event.preventDefault(); }
      return;
    }
    event.preventDefault();
    rove(seen[next]);
    cells[seen[next]].firstElementChild.focus();
  });
  cells.forEach(function (item, index) { item.firstElementChild.tabIndex = index ? -1 : 0; });

  // -- a hint over the cell under the pointer or the focus --
  function hint(link) {
    var node = nodes[Number(link.dataset.node)], box = link.getBoundingClientRect();
    var reason = node.reasons[0];
    tip.textContent = node.name + ' \u2013 ' +
      (reason ? words[reason[0]] + ': ' + (reason[1] ? reason[1] + ': ' : '') + reason[2] : words[node.state]) +
      (node.mode ? ' (' + node.mode + ')' : '');
    tip.hidden = false;
    var left = Math.min(box.left, window.innerWidth - tip.offsetWidth - 8);
    var above = box.top - tip.offsetHeight - 8;
    tip.style.left = Math.max(8, left) + 'px';
    tip.style.top = (above < 8 ? box.bottom + 8 : above) + 'px';
  }
  function hide() { tip.hidden = true; }
  ['mouseover', 'focusin'].forEach(function (name) {
    byId('matrix').addEventListener(name, function (event) {
      var link = event.target.closest('a[data-node]');
      if (link) { hint(link); } else { hide(); }
    });
  });
  ['mouseleave', 'focusout'].forEach(function (name) { byId('matrix').addEventListener(name, hide); });
  window.addEventListener('scroll', function () {
    var focused = document.activeElement;
    // Moving by keyboard scrolls the page; the hint goes along.
    if (!tip.hidden && focused && focused.closest('#matrix')) { hint(focused); } else { hide(); }
  }, { passive: true });

  clear();
  paint();
  var worst = -1;
  nodes.forEach(function (node, index) {
    var better = worst < 0 || keys.state(index) < keys.state(worst);
    if (node.state !== 'ok' && better) { worst = index; }
  });
  if (worst >= 0) { show(worst); }
}());
