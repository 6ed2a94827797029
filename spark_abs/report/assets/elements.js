/* Elements and texts. Every text from the report becomes a text node: it is never parsed. */

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) {
      continue;
    }
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
  return element;
}

/** Return an element of HTML; attributes that begin with `on` are functions. */
function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Return an element of SVG. */
function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Return a drawing that can be scrolled, also by keyboard. */
function scrolled(label, drawing, attributes = {}) {
  return el("div", { class: "scroll drawing", role: "region", "aria-label": label, tabindex: "0", ...attributes }, drawing);
}

/** Return an entry of a legend. */
function swatch(name, text) {
  return el("span", {}, el("i", { class: `swatch ${name}` }), text);
}

/** Return a duration in the unit that suits it. */
function duration(ms) {
  if (ms === null || ms === undefined) {
    return "–";
  }
  for (const [unit, size] of [["d", 86400000], ["h", 3600000], ["min", 60000]]) {
    if (Math.abs(ms) >= size) {
      return `${(ms / size).toFixed(1)} ${unit}`;
    }
  }
  return Math.abs(ms) >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`;
}

/** Return a number of bytes in the unit that suits it. */
function bytes(count) {
  if (count === null || count === undefined) {
    return "–";
  }
  for (const [unit, size] of [["TB", 1024 ** 4], ["GB", 1024 ** 3], ["MB", 1024 ** 2], ["kB", 1024]]) {
    if (Math.abs(count) >= size) {
      return `${(count / size).toFixed(1)} ${unit}`;
    }
  }
  return `${Math.round(count)} B`;
}

/** Return a number with its thousands apart. */
function count(number) {
  return number === null || number === undefined ? "–" : number.toLocaleString("en-US");
}

/** Return a count with the noun for it. */
function counted(number, noun, plural) {
  return `${count(number)} ${number === 1 ? noun : plural || `${noun}s`}`;
}

/** Return a time in the zone of the reader, with ISO as its title. */
function moment(ms) {
  if (ms === null || ms === undefined) {
    return "–";
  }
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) {
    return "–";
  }
  const two = (number) => String(number).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const hour = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return el("time", { datetime: at.toISOString(), title: at.toISOString() }, `${day} ${hour}`);
}

/** Return a link to a checkpoint. */
function checkpointLink(line, text) {
  return el("a", { href: `#/checkpoint=${line.id}` }, text || `${line.id}${line.name ? ` ${line.name}` : ""}`);
}

/** Return the mark of an outcome: a sign and a word, not only a colour. */
function outcomeMark(line) {
  const [sign, word] = {
    completed: ["✓", "completed"],
    aborted: ["✕", "aborted"],
    open: ["…", "open"],
  }[line.outcome];
  const more = line.damage ? "damaged" : line.abandoned ? "abandoned" : line.edited ? "edited" : "";
  return el(
    "span",
    { class: `mark ${line.damage ? "aborted" : line.outcome}` },
    el("span", { "aria-hidden": "true" }, sign),
    ` ${more || word}`,
  );
}

/** Return a table that scrolls in its own box; a column is [title, function of a row, is it a number?]. */
function table(caption, columns, rows, empty) {
  if (!rows.length) {
    return el("p", { class: "empty" }, empty || "Nothing is recorded.");
  }
  const cells = (row) =>
    columns.map(([, cell, number], place) =>
      el(place ? "td" : "th", { class: number ? "number" : null, scope: place ? null : "row" }, cell(row)),
    );
  return el(
    "div",
    { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map(([title, , number]) => el("th", { scope: "col", class: number ? "number" : null }, title)),
        ),
      ),
      el("tbody", {}, rows.map((row) => el("tr", { class: row.rowClass }, cells(row)))),
    ),
  );
}

/** Return names and values as a list. */
function pairs(list) {
  return el(
    "dl",
    { class: "pairs" },
    list.filter(Boolean).map(([name, ...value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

/** Return a section with a heading. */
function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), children);
}

/** Return a text that fits a number of characters. */
function short(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/** Return the end of a location, which tells it from others. */
function tail(place) {
  const parts = place.split("/").filter(Boolean);
  return parts.length ? parts[parts.length - 1] : place;
}

/** Return a command to copy. */
function command(text) {
  return el("pre", { class: "command", tabindex: "0", role: "region", "aria-label": "Command" }, el("code", {}, text));
}
