/*
 * The page of `kvpage bench --html`: one file with everything in it, no script and nothing from a
 * network, so that it can be kept, mailed and printed. It is written as HTML that is well-formed
 * XML too. Every string from outside (model, CPU) goes through text(); plots are SVG, with a title
 * and a description for those who do not see them, and every figure in a plot stands in the table
 * as well.
 */
#include "bench.h"

#include <math.h>
#include <string.h>

/* Of a plot, in its own units, which the page scales. */
enum { WIDTH = 760, ROW = 46, BAR = 14, AXIS = 26, GAPS_HEIGHT = 300, GAPS_LEFT = 46 };

static const char style[] =
    ":root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1b1f24;--soft:#59636e;"
    "--line:#dde2e7;--bar:#2a6fb3;--mark:#b3500f;--shade:#eaf1f9}\n"
    "@media (prefers-color-scheme:dark){:root{--page:#13161a;--card:#1a1e23;--ink:#e7eaee;"
    "--soft:#9da7b2;--line:#2e353d;--bar:#4f97d8;--mark:#f0a35c;--shade:#1d2a38}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--page);color:var(--ink);"
    "font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",sans-serif}\n"
    "main{max-width:56rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}\n"
    "h1{font-size:1.75rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}\n"
    "h2{font-size:1.15rem;margin:2.5rem 0 .75rem}\n"
    "p{margin:.5rem 0;max-width:44rem}\n"
    ".by{color:var(--soft);margin:0}\n"
    ".facts{display:grid;grid-template-columns:1fr;gap:1px;margin:1.75rem 0 0;"
    "background:var(--line);border:1px solid var(--line);border-radius:8px;overflow:hidden}\n"
    "@media (min-width:32rem){.facts{grid-template-columns:1fr 1fr}}\n"
    "@media (min-width:56rem){.facts{grid-template-columns:repeat(4,1fr)}}\n"
    ".facts div{background:var(--card);padding:.6rem .9rem}\n"
    ".facts dt{color:var(--soft);font-size:.8125rem}\n"
    ".facts dd{margin:0;overflow-wrap:anywhere}\n"
    ".card{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:0;"
    "padding:1rem 1.1rem;overflow-x:auto}\n"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\n"
    "caption{text-align:left;color:var(--soft);font-size:.875rem;padding-bottom:.5rem}\n"
    "th,td{padding:.45rem .6rem;border-top:1px solid var(--line);text-align:right;"
    "vertical-align:top;white-space:nowrap}\n"
    "thead th{border-top:0;color:var(--soft);font-size:.8125rem;font-weight:600}\n"
    "th:first-child{text-align:left;padding-left:0;white-space:normal;font-weight:500;"
    "min-width:14rem}\n"
    "td:last-child,thead th:last-child{padding-right:0}\n"
    "td.out{text-align:left;color:var(--soft);white-space:normal}\n"
    "small{display:block;color:var(--soft);font-size:.8125rem;font-weight:400}\n"
    "svg{display:block;width:100%;min-width:34rem;height:auto}\n"
    "svg text{fill:var(--ink);font-size:13px}\n"
    "svg .soft{fill:var(--soft);font-size:12px}\n"
    "svg .end{text-anchor:end}\n"
    "svg .mid{text-anchor:middle}\n"
    ".grid{stroke:var(--line)}\n"
    ".bar,.dot{fill:var(--bar)}\n"
    ".dot{fill-opacity:.65}\n"
    ".track,.during{fill:var(--shade)}\n"
    ".spread{stroke:var(--ink);stroke-width:1.5}\n"
    ".mark{stroke:var(--mark);stroke-width:2}\n"
    "svg text.marked{fill:var(--mark);font-size:12px}\n"
    ".dashed{stroke-dasharray:5 4;stroke-width:1.5}\n"
    "figcaption{color:var(--soft);font-size:.875rem;margin-top:.6rem;max-width:44rem}\n"
    "@media print{main{padding:0;max-width:none}.card,.facts{break-inside:avoid}}\n";

/* --- text --- */

/* As text or between double quotes; what is no UTF-8, or a control character, as U+FFFD. */
static void text(FILE *out, const char *string)
{
    const unsigned char *p = (const unsigned char *)string, *end = p + strlen(string);
    while (p < end) {
        size_t n = utf8_length(p, (size_t)(end - p));
        /* U+FFFE and U+FFFF are characters of UTF-8 but not of XML. */
        bool odd = n == 0 || *p < 0x20 || *p == 0x7f ||
                   (n == 3 && p[0] == 0xef && p[1] == 0xbf && p[2] >= 0xbe);
        if (odd) fputs("&#xfffd;", out);
        else if (*p == '&') fputs("&amp;", out);
        else if (*p == '<') fputs("&lt;", out);
        else if (*p == '>') fputs("&gt;", out);
        else if (*p == '"') fputs("&quot;", out);
        else fwrite(p, 1, n, out);
        p += n ? n : 1;
    }
}

static void fact(FILE *out, const char *name, const char *value)
{
    fprintf(out, "<div><dt>%s</dt><dd>", name);
    text(out, value);
    fputs("</dd></div>\n", out);
}

static const char *title_of(const bench_result *r, const bench_measure *m)
{
    return m->label ? m->label : r->spec->title;
}

/* --- head --- */

static const char *parameters(char buffer[32], uint64_t n)
{
    if (n >= 950000000u) snprintf(buffer, 32, "%.1f billion", (double)n / 1e9);
    else if (n >= 1000000u) snprintf(buffer, 32, "%.3g million", (double)n / 1e6);
    else bench_count(buffer, n);
    return buffer;
}

static void write_model(const bench *b, FILE *out)
{
    const kvp_model_info *i = &b->info;
    char line[256], part[32];
    const char *slash = strrchr(b->path, '/');
    snprintf(line, sizeof line, "%s, %s parameters, %u layers", i->architecture,
             parameters(part, i->parameters), i->n_layers);
    fact(out, "Model", line);
    fact(out, "File", slash ? slash + 1 : b->path);
    snprintf(line, sizeof line, "%s read by each step", format_bytes(part, b->weight_bytes));
    fact(out, "Weights", line);
    snprintf(line, sizeof line, "%s, %s per token", kv_format_name(b->set.kv),
             format_bytes(part, i->kv_bytes_per_token * (b->set.kv == KVP_KV_F32 ? 2 : 1)));
    fact(out, "Keys and values", line);
}

static void write_machine(const bench *b, FILE *out)
{
    char line[256], number[32];
    uint32_t v = kvp_version();
    fact(out, "Machine", b->machine);
    snprintf(line, sizeof line, "%u, instruction set %s", (unsigned)b->threads,
             cpu_level_name(b->info.cpu_level));
    if (b->on_cpu) fact(out, "Threads", line);
    snprintf(line, sizeof line, "reads %s GB/s with these threads",
             bench_number(number, b->bandwidth / 1e9));
    fact(out, "Memory", b->bandwidth > 0 ? line : "bandwidth not measured");
    snprintf(line, sizeof line, "kvpage %u.%u.%u, %s activations", v >> 16, v >> 8 & 0xff, v & 0xff,
             activations_name(b->info.activations));
    fact(out, "Library", line);
}

static void write_head(const bench *b, FILE *out)
{
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>",
          out);
    text(out, bench_model_name(b));
    fprintf(out, " - kvpage bench</title>\n<style>\n%s</style>\n</head>\n<body>\n<main>\n"
                 "<header>\n<h1>", style);
    text(out, bench_model_name(b));
    fprintf(out, "</h1>\n<p class=\"by\">kvpage bench, %s, medians of %u run%s</p>\n"
                 "<dl class=\"facts\">\n", b->date, (unsigned)b->repeats,
            b->repeats == 1 ? "" : "s");
    write_model(b, out);
    write_machine(b, out);
    fputs("</dl>\n</header>\n", out);
}

/* --- the table --- */

static void write_case_name(const bench_result *r, const bench_measure *m, FILE *out)
{
    fputs("<tr><th scope=\"row\">", out);
    text(out, m ? title_of(r, m) : r->spec->title);
    fprintf(out, "<small>%s", r->spec->name);
    if (r->fits && r->note[0]) {
        fputs(": ", out);
        text(out, r->note);
    }
    fputs("</small></th>", out);
}

static void write_measure(const bench_result *r, const bench_measure *m, FILE *out)
{
    char a[32], c[32];
    write_case_name(r, m, out);
    fprintf(out, "<td>%s %s</td>", bench_number(a, bench_median(m)), m->unit);
    fprintf(out, "<td>%s to %s</td>", bench_number(a, bench_least(m)),
            bench_number(c, bench_most(m)));
    if (m->limit > 0)
        fprintf(out, "<td>%s</td><td>%s</td>", bench_number(a, m->limit),
                bench_percent(c, bench_share(m)));
    else
        fputs("<td>none</td><td>-</td>", out);
    fputs("</tr>\n", out);
}

static void write_table(const bench *b, FILE *out)
{
    fputs("<section>\n<h2 id=\"figures\">All figures</h2>\n"
          "<div class=\"card\" role=\"region\" tabindex=\"0\" aria-labelledby=\"figures\">\n"
          "<table>\n"
          "<caption>Limit: what the memory's read bandwidth allows, in the unit of the row. Share: "
          "how much of it was reached.</caption>\n"
          "<thead><tr><th scope=\"col\">Case</th><th scope=\"col\">Median</th>"
          "<th scope=\"col\">Least to most</th><th scope=\"col\">Limit</th>"
          "<th scope=\"col\">Share</th></tr></thead>\n<tbody>\n", out);
    for (size_t i = 0; i < BENCH_CASES; i++) {
        const bench_result *r = &b->results[i];
        if (!r->wanted) continue;
        for (size_t k = 0; r->done && k < r->n_measures; k++)
            write_measure(r, &r->measures[k], out);
        if (r->fits) continue;
        write_case_name(r, NULL, out);
        fputs("<td class=\"out\" colspan=\"4\">left out: ", out);
        text(out, r->note);
        fputs("</td></tr>\n", out);
    }
    fputs("</tbody>\n</table>\n</div>\n</section>\n", out);
}

/* --- axes --- */

typedef struct axis {
    double step, top;
} axis;

/* Steps of 1, 2 or 5 times a power of ten, about five of them. */
static axis axis_for(double most)
{
    axis a = {1, 1};
    if (!(most > 0)) return a;
    a.step = pow(10, floor(log10(most / 5)));
    if (most / a.step > 30) a.step *= 10;
    else if (most / a.step > 12) a.step *= 5;
    else if (most / a.step > 6) a.step *= 2;
    a.top = ceil(most / a.step - 1e-9) * a.step;
    return a;
}

static const char *tick(char buffer[32], double value)
{
    if (value >= 1000) return bench_number(buffer, value);
    snprintf(buffer, 32, "%.3g", value);
    return buffer;
}

static void open_figure(FILE *out, const char *id, const char *heading, const char *intro,
                        int height)
{
    fprintf(out, "<section>\n<h2>%s</h2>\n%s<figure class=\"card\">\n"
                 "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"%s-t %s-d\">\n"
                 "<title id=\"%s-t\">%s</title>\n<desc id=\"%s-d\">",
            heading, intro, WIDTH, height, id, id, id, heading, id);
}

static void close_figure(FILE *out, const char *caption)
{
    fprintf(out, "</svg>\n<figcaption>%s</figcaption>\n</figure>\n</section>\n", caption);
}

/* --- bars --- */

/* What a bar is of: the measure itself, or the share of its limit in percent. */
typedef struct bars {
    const char *id, *heading, *unit, *caption;
    bool shares;
} bars;

static bool takes(const bars *c, const bench_measure *m)
{
    return c->shares ? m->limit > 0 : !strcmp(m->unit, c->unit);
}

static double share_at(const bench_measure *m, double value)
{
    if (value <= 0) return 0;
    return 100 * (m->less_is_better ? m->limit / value : value / m->limit);
}

typedef struct bar {
    double median, low, high, limit;
} bar;

static bar bar_of(const bars *c, const bench_measure *m)
{
    bar v = {bench_median(m), bench_least(m), bench_most(m), m->limit};
    if (c->shares) {
        double low = share_at(m, v.low), high = share_at(m, v.high);
        v = (bar){share_at(m, v.median), fmin(low, high), fmax(low, high), 100};
    }
    return v;
}

typedef void each(const bars *c, const bench_result *r, const bench_measure *m, void *user);

static void for_each(const bench *b, const bars *c, each *do_it, void *user)
{
    for (size_t i = 0; i < BENCH_CASES; i++)
        for (size_t k = 0; b->results[i].done && k < b->results[i].n_measures; k++)
            if (takes(c, &b->results[i].measures[k]))
                do_it(c, &b->results[i], &b->results[i].measures[k], user);
}

typedef struct canvas {
    FILE *out;
    axis axis;
    int n;      /* bars so far, and then in all */
    double most;
} canvas;

static void size_up(const bars *c, const bench_result *r, const bench_measure *m, void *user)
{
    canvas *w = user;
    bar v = bar_of(c, m);
    (void)r;
    w->n++;
    if (v.high > w->most) w->most = v.high;
}

static void describe(const bars *c, const bench_result *r, const bench_measure *m, void *user)
{
    canvas *w = user;
    char a[32];
    text(w->out, title_of(r, m));
    fprintf(w->out, ": %s %s. ", bench_number(a, bar_of(c, m).median), c->unit);
}

static double across(const canvas *w, double value)
{
    return value / w->axis.top * (WIDTH - 2) + 1;
}

static void draw_bar(const bars *c, const bench_result *r, const bench_measure *m, void *user)
{
    canvas *w = user;
    bar v = bar_of(c, m);
    char a[32], low[32], high[32];
    double y = w->n++ * ROW, middle = y + 24 + BAR / 2.0, caps[2];
    caps[0] = across(w, v.low);
    caps[1] = across(w, v.high);
    fprintf(w->out, "<text x=\"1\" y=\"%.0f\">", y + 16);
    text(w->out, title_of(r, m));
    if (r->note[0])
        fprintf(w->out, "<tspan class=\"soft\">  (here %s)</tspan>",
                bench_count(a, r->long_prompt ? r->long_prompt : r->prompt));
    fprintf(w->out, "</text><text class=\"end\" x=\"%d\" y=\"%.0f\">%s %s", WIDTH - 1, y + 16,
            bench_number(a, v.median), c->unit);
    if (m->n > 1)
        fprintf(w->out, "<tspan class=\"soft\">  (%s to %s)</tspan>", bench_number(low, v.low),
                bench_number(high, v.high));
    fprintf(w->out, "</text>\n<rect class=\"track\" x=\"1\" y=\"%.0f\" width=\"%d\" height=\"%d\" "
                    "rx=\"2\"/><rect class=\"bar\" x=\"1\" y=\"%.0f\" width=\"%.1f\" height=\"%d\" "
                    "rx=\"2\"/>\n", y + 24, WIDTH - 2, BAR, y + 24,
            fmax(across(w, v.median) - 1, 1), BAR);
    if (m->n > 1)
        fprintf(w->out, "<path class=\"spread\" fill=\"none\" d=\"M%.1f %.1fH%.1fM%.1f %.1fv8M%.1f "
                        "%.1fv8\"/>\n", caps[0], middle, caps[1], caps[0], middle - 4, caps[1],
                middle - 4);
    if (v.limit > 0 && v.limit <= w->axis.top)
        fprintf(w->out, "<path class=\"mark\" d=\"M%.1f %.0fv%d\"/>\n",
                fmin(across(w, v.limit), WIDTH - 1), y + 21, BAR + 6);
}

static void draw_axis(const canvas *w)
{
    char a[32];
    int foot = w->n * ROW + 4;
    for (double v = 0; v <= w->axis.top * 1.0001; v += w->axis.step) {
        double x = across(w, v);
        const char *where = v <= 0 ? "" : v >= w->axis.top * 0.9999 ? " end" : " mid";
        fprintf(w->out, "<path class=\"grid\" d=\"M%.1f %dv5\"/><text class=\"soft%s\" x=\"%.1f\" "
                        "y=\"%d\">%s</text>\n", x, foot, where, x, foot + 18, tick(a, v));
    }
}

static void write_bars(const bench *b, const bars *c, FILE *out)
{
    canvas w = {.out = out};
    for_each(b, c, size_up, &w);
    if (!w.n) return;
    w.axis = axis_for(c->shares ? fmax(w.most, 100) : w.most);
    open_figure(out, c->id, c->heading, "", w.n * ROW + AXIS);
    for_each(b, c, describe, &w);
    fputs("</desc>\n", out);
    draw_axis(&w);
    w.n = 0;
    for_each(b, c, draw_bar, &w);
    close_figure(out, c->caption);
}

/* --- gaps over time --- */

typedef struct plot {
    double from, to; /* ms */
    axis across, up;
} plot;

static double plot_x(const plot *p, double ms)
{
    return GAPS_LEFT + (ms - p->from) / (p->to - p->from) * (WIDTH - GAPS_LEFT - 8);
}

static double plot_y(const plot *p, double ms)
{
    return GAPS_HEIGHT - AXIS - ms / p->up.top * (GAPS_HEIGHT - AXIS - 24);
}

static plot plot_of(const bench_gaps *g)
{
    plot p = {0, g->end_ms, {1, 1}, {1, 1}};
    double most = g->p99_ms;
    for (size_t i = 0; i < g->n; i++) {
        p.from = fmin(p.from, g->items[i].at_ms);
        p.to = fmax(p.to, g->items[i].at_ms);
        most = fmax(most, g->items[i].gap_ms);
    }
    p.across = axis_for((p.to - p.from) / 1e3);
    p.up = axis_for(most);
    return p;
}

static void draw_plot_axes(const plot *p, FILE *out)
{
    char a[32];
    double first = ceil(p->from / 1e3 / p->across.step) * p->across.step;
    for (double v = 0; v <= p->up.top * 1.0001; v += p->up.step) {
        double y = plot_y(p, v);
        fprintf(out, "<path class=\"grid\" d=\"M%d %.1fH%d\"/><text class=\"soft end\" x=\"%d\" "
                     "y=\"%.1f\">%s</text>\n", GAPS_LEFT, y, WIDTH - 8, GAPS_LEFT - 7, y + 4,
                tick(a, v));
    }
    for (double v = first; v <= p->to / 1e3; v += p->across.step) {
        /* Not where the unit stands. */
        if (plot_x(p, v * 1e3) > WIDTH - 60) break;
        fprintf(out, "<text class=\"soft mid\" x=\"%.1f\" y=\"%d\">%s%s</text>\n",
                plot_x(p, v * 1e3), GAPS_HEIGHT - 8, v < -1e-9 ? "-" : "", tick(a, fabs(v)));
    }
    fprintf(out, "<text class=\"soft end\" x=\"%d\" y=\"%d\">seconds</text>"
                 "<text class=\"soft\" x=\"1\" y=\"12\">gap, ms</text>\n", WIDTH - 8,
            GAPS_HEIGHT - 8);
}

/* Sequences that move in step have the same point. */
static void draw_points(const bench_gaps *g, const plot *p, FILE *out)
{
    double last_x = -1, last_y = -1;
    for (size_t i = 0; i < g->n; i++) {
        double x = plot_x(p, g->items[i].at_ms), y = plot_y(p, g->items[i].gap_ms);
        if (fabs(x - last_x) < 0.2 && fabs(y - last_y) < 0.2) continue;
        fprintf(out, "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n", x, y);
        last_x = x;
        last_y = y;
    }
}

static void write_gaps(const bench *b, const bench_result *r, FILE *out)
{
    const bench_gaps *g = &b->gaps;
    char caption[320], p99[32], tokens[32], seconds[32];
    plot p;
    double y;
    if (!r->done || !g->n) return;
    p = plot_of(g);
    y = plot_y(&p, g->p99_ms);
    bench_number(p99, g->p99_ms);
    bench_count(tokens, r->long_prompt);
    bench_number(seconds, g->end_ms / 1e3);
    open_figure(out, "gaps", "Gaps between tokens while a long prompt comes in", "", GAPS_HEIGHT);
    fprintf(out, "%u sequences generate; a prompt of %s tokens arrives at 0 seconds and has been "
                 "read after %s seconds. Meanwhile 99 of 100 gaps are at most %s ms.</desc>\n",
            (unsigned)r->sequences, tokens, seconds, p99);
    fprintf(out, "<rect class=\"during\" x=\"%.1f\" y=\"24\" width=\"%.1f\" height=\"%d\"/>\n",
            plot_x(&p, 0), plot_x(&p, g->end_ms) - plot_x(&p, 0), GAPS_HEIGHT - AXIS - 24);
    draw_plot_axes(&p, out);
    draw_points(g, &p, out);
    fprintf(out, "<path class=\"mark dashed\" fill=\"none\" d=\"M%.1f %.1fH%.1f\"/>"
                 "<text class=\"marked end\" x=\"%.1f\" y=\"%.1f\">P99 %s ms</text>\n",
            plot_x(&p, 0), y, plot_x(&p, g->end_ms), plot_x(&p, g->end_ms) - 6,
            y > 44 ? y - 7 : y + 16, p99);
    snprintf(caption, sizeof caption,
             "Each point: a token of one of the %u sequences, and how long after that sequence's "
             "last one it came. Shaded: the prompt of %s tokens is being read. The last run of %u.",
             (unsigned)r->sequences, tokens, (unsigned)b->repeats);
    close_figure(out, caption);
}

/* --- the page --- */

static void write_notes(const bench *b, FILE *out)
{
    fputs("<section>\n<h2>How it was measured</h2>\n"
          "<p>Prompts are random tokens, and no run finds an earlier one's in the cache. Where "
          "sequences generate, their prompts were read before and only the steps afterwards are "
          "timed, all sequences together.</p>\n"
          "<p>A step must read every weight once, and the keys and values of each sequence; a "
          "prompt that sequences share counts once. These bytes over the read bandwidth, measured at "
          "the beginning with as many threads, are the limit. Reading a prompt is bound by arithmetic, "
          "not by memory, and has none here.</p>\n", out);
    if (bench_passes_limit(b))
        fputs("<p>More than 100 %: the model stayed in the CPU's cache in part, or something else "
              "ran while the bandwidth was measured.</p>\n", out);
    fputs("</section>\n", out);
}

bool bench_html(const bench *b, FILE *out)
{
    static const bars rates = {"rates", "Tokens per second", "tok/s",
                               "Bars: medians. Thin lines: least to most of the runs. "
                               "Orange: the limit, where it is in range.", false};
    static const bars shares = {"shares", "Share of what the memory allows", "%",
                                "100 %: bytes that must be read, at the bandwidth measured.",
                                true};
    static const bars times = {"times", "Milliseconds", "ms", "Shorter is better.", false};
    static const bars outside = {"outside", "Time outside the kernels", "%",
                                 "Planning a step and taking in its results, of the whole time. "
                                 "Shorter is better.", false};
    write_head(b, out);
    write_bars(b, &rates, out);
    for (size_t i = 0; i < BENCH_CASES; i++)
        if (b->results[i].spec->kind == BENCH_MIXED) write_gaps(b, &b->results[i], out);
    write_bars(b, &shares, out);
    write_bars(b, &times, out);
    write_bars(b, &outside, out);
    write_table(b, out);
    write_notes(b, out);
    fputs("</main>\n</body>\n</html>\n", out);
    return !ferror(out);
}
