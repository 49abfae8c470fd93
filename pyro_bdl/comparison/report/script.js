"use strict";
// A click on a heading sorts the rows by it: numbers by their full value, cells without one last.
const order = (first, second, column, sign) => {
  const [a, b] = [first.cells[column], second.cells[column]];
  const [x, y] = [Number(a.dataset.value ?? NaN), Number(b.dataset.value ?? NaN)];
  if (!(isNaN(x) && isNaN(y)))
    return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
  return sign * a.textContent.localeCompare(b.textContent, undefined, {numeric: true});
};
for (const part of document.querySelectorAll(".table")) {
  const table = part.querySelector("table"), scroll = part.querySelector(".scroll");
  const bodies = [...table.tBodies].map(body => [body, [...body.rows]]);
  const rows = () => [...table.querySelectorAll("tr[data-place]")];
  const ranked = part.querySelector("[data-ranked]");
  const unmark = () =>
    table.querySelectorAll("[aria-sort]").forEach(head => head.removeAttribute("aria-sort"));
  for (const button of table.querySelectorAll("[data-column]")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      unmark();
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const sorted = rows();
      sorted.sort((a, b) => order(a, b, Number(button.dataset.column), ascending ? 1 : -1));
      table.querySelectorAll(".rank").forEach(row => { row.hidden = true; });
      table.tBodies[0].append(...sorted);
      if (ranked) ranked.disabled = false;
    });
  }
  // The order of the ranking, under its headings again.
  ranked?.addEventListener("click", () => {
    unmark();
    for (const [body, members] of bodies) {
      members.forEach(row => { row.hidden = false; });
      body.append(...members);
    }
    ranked.disabled = true;
  });
  // The frame shows by a shadow at which sides there are more columns.
  const cue = () => {
    part.classList.toggle("before", scroll.scrollLeft > 1);
    part.classList.toggle("after",
      scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 1);
  };
  for (const button of part.querySelectorAll("[data-shows]")) {
    const members = [...table.querySelectorAll("[data-group]")]
      .filter(cell => cell.dataset.group === button.dataset.shows);
    const show = shown => {
      button.setAttribute("aria-pressed", shown);
      members.forEach(cell => { cell.hidden = !shown; });
      const first = table.querySelector("tr:last-child");
      const columns = first ? [...first.cells].filter(cell => !cell.hidden).length : 1;
      table.querySelectorAll(".rank th").forEach(head => { head.colSpan = columns; });
      cue();
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-pressed") !== "true"));
    show(button.getAttribute("aria-pressed") === "true");
  }
  scroll.addEventListener("scroll", cue);
  addEventListener("resize", cue);
  cue();
}
