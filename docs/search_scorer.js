/* The order of the results of the search: html_search_scorer in conf.py.

Sphinx finds the pages that have all words of the query. Its own order has many equals, which it then
sorts by the alphabet: one word in any heading is worth as much as the whole query in the title. Here
a page counts by the heading that says most of the query, and a word that few pages have counts more
than one of every page. The first is the page of which a heading is the query. Classes and functions
come after the pages, unless the query is their name. What is not for users comes last, unless the
query is a heading there. */

var Scorer = (() => {
    /** Return the words of a text as they are in the index: without endings and without "the". */
    const words = text => {
        const stemmer = new Stemmer();
        return splitQuery(text.toLowerCase())
            .filter(word => !stopwords.has(word))
            .map(word => stemmer.stemWord(word));
    };

    const asked = () => words(new URLSearchParams(window.location.search).get("q") || "");

    /** Return how much a word says: the fewer pages have it, the more. */
    const weight = word => {
        const { docnames, terms, titleterms } = Search._index;
        const pages = [terms, titleterms].flatMap(index => (Object.hasOwn(index, word) ? index[word] : []));
        return Math.log(1 + docnames.length / Math.max(new Set(pages).size, 1));
    };

    /** Return how much of the query a heading says, from 0 to 1. */
    const share = heading => {
        const sum = list => list.map(weight).reduce((all, one) => all + one, 0);
        const said = words(heading);
        return sum(asked().filter(word => said.includes(word))) / sum(asked());
    };

    const score_of_page = name => {
        const { alltitles, docnames, titles } = Search._index;
        const page = docnames.indexOf(name);
        const headings = Object.keys(alltitles).filter(heading =>
            alltitles[heading].some(([where]) => where === page),
        );
        return 10 * Math.max(0, ...headings.map(share)) + 5 * share(titles[page]);
    };

    return {
        // The points of Sphinx. Those of classes and functions are half of its own.
        objNameMatch: 6,
        objPartialMatch: 3,
        objPrio: { 0: 7, 1: 2, 2: -3 },
        objPrioDefault: 0,
        title: 15,
        partialTitle: 7,
        term: 5,
        partialTerm: 2,

        score: ([page, , , , points, , kind]) => {
            let result = points;
            if (kind === SearchResultKind.title) result += 15; // the query is at least half of a heading
            if (kind === SearchResultKind.index) result = Math.min(points, 8);
            if (kind === SearchResultKind.text) result = score_of_page(page);
            if (page.startsWith("reference/")) result -= 0.5; // between equals, first what explains
            const for_users = !page.startsWith("contributing/") && page !== "changelog";
            if (!for_users && kind !== SearchResultKind.title) result -= 100;
            return result;
        },
    };
})();
