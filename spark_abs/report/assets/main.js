/* The frame: the address chooses the view, a page that is served follows the job. */

const VIEWS = [
  ["overview", "Overview", overview],
  ["history", "History", historyView],
  ["checkpoint", "Checkpoint", checkpointView],
  ["stage", "Stage", stageView],
  ["sizes", "Sizes", sizesView],
  ["attempts", "Attempts", attemptsView],
  ["undo", "Restore", undoView],
  ["compare", "Compare", compareView],
  ["settings", "Settings", settingsView],
];
const THEMES = ["system", "light", "dark"];

const $ = (id) => document.getElementById(id);
const plain = JSON.parse($("report").textContent);

const ui = {
  report: decoded(plain),
  filter: { outcome: "", kind: "", attempt: "", order: "", least: "", text: "", page: 0 },
  go(address) {
    location.hash = `/${address}`;
  },
  draw,
};

/** Return the view in the address and what is chosen in it. */
function chosenView() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("=");
  const view = VIEWS.find(([known]) => known === name) || VIEWS[0];
  let chosen = rest.join("=");
  try {
    chosen = decodeURIComponent(chosen);
  } catch {
    chosen = "";
  }
  return [view, chosen];
}

/** Draw the chosen view; the focus stays on the control that has it. */
function draw() {
  const [[name, title, view], chosen] = chosenView();
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
  const graph = document.querySelector('[data-key="graph"]');
  const scrolled = graph ? [graph.scrollLeft, graph.scrollTop] : null;
  drawFrame(name);
  $("main").replaceChildren(...[view(ui.report, chosen, ui)].flat(3).filter(Boolean));
  document.title = `${title} – ${ui.report.job}`;
  const again = focused ? document.querySelector(`[data-key="${CSS.escape(focused)}"]`) : null;
  if (again) {
    again.focus({ preventScroll: true });
  }
  const drawnGraph = document.querySelector('[data-key="graph"]');
  if (scrolled && drawnGraph) {
    [drawnGraph.scrollLeft, drawnGraph.scrollTop] = scrolled;
  }
}

function drawFrame(name) {
  const report = ui.report;
  $("job").textContent = report.job;
  $("root").textContent = report.root;
  const run = report.runs[report.runs.length - 1];
  const alive = report.alive ? `at work: ${report.alive}` : run ? `no run is alive; run ${run.id} ${run.kind === "job" ? "" : `(${run.kind}) `}${run.ended && !run.ended.startsWith("killed") ? "ended" : "was killed"}` : "never started";
  $("state").className = `state ${report.alive ? "alive" : "dead"}`;
  $("state").replaceChildren(el("span", { "aria-hidden": "true" }, report.alive ? "● " : "○ "), alive);
  const focused = document.activeElement && $("views").contains(document.activeElement) ? document.activeElement.hash : null;
  $("views").replaceChildren(
    ...VIEWS.map(([key, title]) => el("a", { href: `#/${key}`, "aria-current": key === name ? "page" : null }, title)),
  );
  if (focused) {
    const again = $("views").querySelector(`[href="${CSS.escape(focused)}"]`);
    if (again) {
      again.focus({ preventScroll: true });
    }
  }
  const current = $("views").querySelector("[aria-current]");
  $("views").scrollLeft = Math.max(0, current.offsetLeft - $("views").clientWidth / 2);
  $("footer").replaceChildren(
    "As of ", moment(report.made_ms),
    report.live ? ", follows the job" : "",
    `. spark_abs ${report.version}. Times are in the zone of this browser.`,
  );
}

/* ---- light and dark ---- */

function theme() {
  try {
    const found = localStorage.getItem("spark-abs-theme");
    return THEMES.includes(found) ? found : "system";
  } catch {
    return "system";
  }
}

function setTheme(chosen) {
  document.documentElement.dataset.theme = chosen;
  $("theme").textContent = `Colours: ${chosen}`;
  try {
    localStorage.setItem("spark-abs-theme", chosen);
  } catch {
    /* A page in a file may have no storage. */
  }
}

$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});

/* ---- a running job ---- */

let etag = null;

/** Say whether the reader is just choosing or typing something in the view. */
function busy() {
  const at = document.activeElement;
  return Boolean(at && $("main").contains(at) && /^(INPUT|SELECT)$/.test(at.tagName));
}

async function follow() {
  try {
    const headers = etag ? { "If-None-Match": etag } : {};
    const answer = await fetch("data.json", { headers, cache: "no-store" });
    if (answer.ok) {
      etag = answer.headers.get("ETag");
      ui.report = decoded(await answer.json());
      if (busy()) {
        drawFrame(chosenView()[0][0]);
      } else {
        draw();
      }
    } else if (answer.status !== 304) {
      $("footer").textContent = `The job is not followed: ${await answer.text()}`;
    }
  } catch {
    $("footer").textContent = "The job is not followed: spark-abs serve does not answer.";
  }
  setTimeout(follow, plain.live);
}

setTheme(theme());
window.addEventListener("hashchange", () => {
  draw();
  window.scrollTo(0, 0);
});
draw();
if (plain.live) {
  setTimeout(follow, plain.live);
}
