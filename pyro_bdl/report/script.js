"use strict";
// A click on a heading sorts the rows by it: numbers by their full value, cells without one last.
const order = (first, second, column, sign) => {
  const [a, b] = [first.cells[column], second.cells[column]];
  const [x, y] = [Number(a.dataset.value ?? NaN), Number(b.dataset.value ?? NaN)];
  if (!(isNaN(x) && isNaN(y)))
    return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
  return sign * a.textContent.localeCompare(b.textContent, undefined, {numeric: true});
};
for (const table of document.querySelectorAll("table")) {
  for (const button of table.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const column = Number(button.dataset.column);
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => order(a, b, column, ascending ? 1 : -1));
      table.tBodies[0].append(...rows);
    });
  }
}
