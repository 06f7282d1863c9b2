/*
 * Conversations as token ids. See chat.h for the invariant.
 *
 * Marks are pushed as ids, everything else goes through the tokenizer as plain text. What stands
 * between two marks is tokenized in one go ("user\n" and the message behind it, say), because that
 * is how the text of a template would be cut too.
 *
 * From a template these things are read, by looking for their text: which marks it has, a default
 * system prompt (ChatML), whether the system prompt has lines about dates (Llama 3.1), and where
 * Mistral's many versions put their spaces.
 */
#include "model/chat.h"

#include "model/tokenizer_priv.h"
#include "model/unicode.h"

#include <string.h>

/* --- reading a template --- */

static const char *find_in(const char *p, const char *end, const char *what)
{
    size_t n = strlen(what);
    for (; (size_t)(end - p) >= n; p++) {
        p = memchr(p, what[0], (size_t)(end - p) - n + 1);
        if (!p) return NULL;
        if (memcmp(p, what, n) == 0) return p;
    }
    return NULL;
}

static bool contains(kvp__str s, const char *what)
{
    return s.data && find_in(s.data, s.data + s.bytes, what);
}

static int32_t mark(const kvp__tokenizer *t, const char *text)
{
    int32_t id = kvp__tokenizer_find(t, text, strlen(text));
    return kvp__tokenizer_flags(t, id) & KVP_TOKEN_SPECIAL ? id : -1;
}

static bool has_marks(const kvp__tokenizer *t, uint32_t format)
{
    static const char *const needed[][3] = {
        [KVP_CHAT_CHATML] = {"<|im_start|>", "<|im_end|>"},
        [KVP_CHAT_GEMMA] = {"<start_of_turn>", "<end_of_turn>"},
        [KVP_CHAT_LLAMA3] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
        [KVP_CHAT_MISTRAL] = {NULL}, /* [INST] is plain text in the older ones */
    };
    for (size_t i = 0; i < 3 && needed[format][i]; i++)
        if (mark(t, needed[format][i]) < 0) return false;
    return format != KVP_CHAT_MISTRAL || t->eos >= 0;
}

/* The literal between "<|im_start|>system\n" and "<|im_end|>", where a template has one: the prompt
 * that it puts first when the conversation has none. Line ends are written as such or as \n. */
static bool read_default_system(kvp__tokenizer *t, kvp__str text)
{
    static const char open[] = "<|im_start|>system", close[] = "<|im_end|>";
    const char *end = text.data + text.bytes, *p = text.data;
    while ((p = find_in(p, end, open))) {
        p += strlen(open);
        const char *stop = find_in(p, end, close), *q = p;
        if (!stop) return true;
        if (*q == '\n') q++;
        else if (stop - q >= 2 && q[0] == '\\' && q[1] == 'n') q += 2;
        else continue;
        if (q == stop || memchr(q, '\'', (size_t)(stop - q)) || memchr(q, '"', (size_t)(stop - q)))
            continue;
        char *copy = kvp__alloc(&t->hooks, (size_t)(stop - q));
        if (!copy) return false;
        t->chat.default_system_size = (size_t)(stop - q);
        t->chat.default_system = copy;
        size_t n = 0;
        for (; q < stop; q++) {
            bool escape = q[0] == '\\' && q + 1 < stop;
            if (escape) q++;
            copy[n++] = escape && *q == 'n' ? '\n' : *q;
        }
        t->chat.default_system_bytes = n;
        return true;
    }
    return true;
}

static void read_mistral(kvp__tokenizer *t, kvp__str text)
{
    kvp__mistral_style *m = &t->chat.mistral;
    m->space_before_open = contains(text, " [INST]");
    m->space_after_open = contains(text, "[INST] ");
    m->space_before_close = contains(text, " [/INST]");
    m->space_before_reply = contains(text, "' ' + message['content']") ||
                            contains(text, "\" \" + message[\"content\"]");
    m->trims_reply = contains(text, "|trim") || contains(text, "| trim");
    m->system_last = contains(text, "loop.last and system_message");
    m->system_mark = contains(text, "[SYSTEM_PROMPT]") && mark(t, "[SYSTEM_PROMPT]") >= 0 &&
                     mark(t, "[/SYSTEM_PROMPT]") >= 0;
    m->space_after_system = contains(text, "[SYSTEM_PROMPT] ");
}

bool kvp__chat_read(kvp__tokenizer *t, kvp__str text)
{
    uint32_t format = contains(text, "<|im_start|>")          ? KVP_CHAT_CHATML
                      : contains(text, "<start_of_turn>")     ? KVP_CHAT_GEMMA
                      : contains(text, "<|start_header_id|>") ? KVP_CHAT_LLAMA3
                      : contains(text, "[INST]") && !contains(text, "<<SYS>>") ? KVP_CHAT_MISTRAL
                                                                               : KVP_CHAT_NONE;
    t->chat.format = KVP_CHAT_NONE;
    if (format == KVP_CHAT_NONE || !has_marks(t, format)) return true;
    t->chat.format = format;
    t->chat.dated_system = contains(text, "Cutting Knowledge Date");
    if (format == KVP_CHAT_MISTRAL) read_mistral(t, text);
    return format != KVP_CHAT_CHATML || read_default_system(t, text);
}

/* --- writing a conversation --- */

typedef enum role { SYSTEM, USER, ASSISTANT } role;

typedef struct writer {
    const kvp__tokenizer *t;
    const kvp__chat_style *style; /* the file's; a plain one if another format is asked for */
    kvp__ids ids;
    char *text;                   /* plain text since the last mark */
    size_t n_text, text_size;
    kvp__str system;              /* waits to be folded into the user's turn */
    bool keep_system;             /* not into this one: the template puts it into the last */
    bool opening;                 /* nothing of the conversation is there yet */
    kvp_status status;
    kvp_error *err;
} writer;

/* The first failure stays; later calls do nothing. */
static void no_memory(writer *w)
{
    w->status = kvp__fail(w->err, KVP_ERR_NO_MEMORY, "no memory for a conversation's tokens");
}

static void put_text(writer *w, const char *text, size_t bytes)
{
    if (w->status != KVP_OK || bytes == 0) return;
    if (bytes > SIZE_MAX / 4 - w->n_text) {
        no_memory(w);
        return;
    }
    if (w->n_text + bytes > w->text_size) {
        size_t size = 2 * (w->n_text + bytes) + 64;
        char *grown = kvp__alloc(&w->t->hooks, size);
        if (!grown) {
            no_memory(w);
            return;
        }
        if (w->n_text) memcpy(grown, w->text, w->n_text);
        kvp__free(&w->t->hooks, w->text, w->text_size);
        w->text = grown;
        w->text_size = size;
    }
    memcpy(w->text + w->n_text, text, bytes);
    w->n_text += bytes;
}

static void put(writer *w, const char *text) { put_text(w, text, strlen(text)); }

static void end_text(writer *w)
{
    if (w->status != KVP_OK) return;
    w->status = kvp__tokenizer_append(w->t, &w->ids, w->text, w->n_text, 0, w->err);
    w->n_text = 0;
}

static void put_id(writer *w, int32_t id)
{
    end_text(w);
    if (w->status == KVP_OK && id >= 0 && !kvp__ids_push(&w->ids, id)) no_memory(w);
}

/* A mark of the format as a special token; as text if the vocabulary has no such token, which
 * has_marks allows for old Mistral files alone. */
static void put_mark(writer *w, const char *text)
{
    int32_t id = mark(w->t, text);
    if (id >= 0) put_id(w, id);
    else put(w, text);
}

/* White space as the templates' own trimming has it, that of Python's str.strip. */
static bool is_blank(uint32_t c)
{
    return (c >= 0x1c && c <= 0x1f) || kvp__unicode_class(c) == KVP__UNI_SPACE;
}

static kvp__str trim(kvp__str s)
{
    const uint8_t *p = (const uint8_t *)s.data, *end = p + s.bytes;
    const uint8_t *from = NULL, *to = NULL;
    while (p < end) {
        uint32_t c;
        size_t n = kvp__unicode_next(p, end, &c);
        if (!is_blank(c)) {
            if (!from) from = p;
            to = p + n;
        }
        p += n;
    }
    if (!from) return (kvp__str){s.data, 0};
    return (kvp__str){(const char *)from, (size_t)(to - from)};
}

static void put_str(writer *w, kvp__str s) { put_text(w, s.data, s.bytes); }

/* The system prompt goes in front of the user's words, where a format has no turn for it. */
static void put_folded_system(writer *w)
{
    if (!w->system.data || w->keep_system) return;
    put_str(w, w->system);
    put(w, "\n\n");
    w->system.data = NULL;
}

/* A format is three moves: begin a turn, put a message in it, end it. */
typedef struct format {
    void (*begin)(writer *w, role r);
    void (*content)(writer *w, role r, kvp__str text);
    void (*end)(writer *w, role r);
    bool folds_system;
    bool has_bos; /* always, not only where the tokenizer adds one */
} format;

static void chatml_begin(writer *w, role r)
{
    put_mark(w, "<|im_start|>");
    put(w, r == SYSTEM ? "system\n" : r == USER ? "user\n" : "assistant\n");
}

static void plain_content(writer *w, role r, kvp__str text)
{
    (void)r;
    put_str(w, text);
}

static void chatml_end(writer *w, role r)
{
    (void)r;
    put_mark(w, "<|im_end|>");
    put(w, "\n");
}

static void gemma_begin(writer *w, role r)
{
    put_mark(w, "<start_of_turn>");
    put(w, r == USER ? "user\n" : "model\n");
    if (r == USER) put_folded_system(w);
}

static void trimmed_content(writer *w, role r, kvp__str text)
{
    (void)r;
    put_str(w, trim(text));
}

static void gemma_end(writer *w, role r)
{
    (void)r;
    put_mark(w, "<end_of_turn>");
    put(w, "\n");
}

static void llama3_begin(writer *w, role r)
{
    put_mark(w, "<|start_header_id|>");
    put(w, r == SYSTEM ? "system" : r == USER ? "user" : "assistant");
    put_mark(w, "<|end_header_id|>");
    put(w, "\n\n");
    if (r == SYSTEM && w->style->dated_system && w->opening)
        put(w, "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
}

static void llama3_end(writer *w, role r)
{
    (void)r;
    put_mark(w, "<|eot_id|>");
}

static void mistral_begin(writer *w, role r)
{
    const kvp__mistral_style *m = &w->style->mistral;
    if (r == SYSTEM) {
        put_mark(w, "[SYSTEM_PROMPT]");
        if (m->space_after_system) put(w, " ");
    } else if (r == USER) {
        if (m->space_before_open) put(w, " ");
        put_mark(w, "[INST]");
        if (m->space_after_open) put(w, " ");
        put_folded_system(w);
    }
}

static void mistral_content(writer *w, role r, kvp__str text)
{
    const kvp__mistral_style *m = &w->style->mistral;
    if (r == ASSISTANT && m->space_before_reply) put(w, " ");
    put_str(w, r == ASSISTANT && m->trims_reply ? trim(text) : text);
}

static void mistral_end(writer *w, role r)
{
    if (r == SYSTEM) {
        put_mark(w, "[/SYSTEM_PROMPT]");
    } else if (r == USER) {
        if (w->style->mistral.space_before_close) put(w, " ");
        put_mark(w, "[/INST]");
    } else {
        put_id(w, w->t->eos);
    }
}

static const format formats[] = {
    [KVP_CHAT_CHATML] = {chatml_begin, plain_content, chatml_end, false, false},
    [KVP_CHAT_GEMMA] = {gemma_begin, trimmed_content, gemma_end, true, true},
    [KVP_CHAT_LLAMA3] = {llama3_begin, trimmed_content, llama3_end, false, true},
    [KVP_CHAT_MISTRAL] = {mistral_begin, mistral_content, mistral_end, true, true},
};

static void put_turn(writer *w, const format *f, role r, kvp__str text)
{
    f->begin(w, r);
    f->content(w, r, text);
    f->end(w, r);
    w->opening = false;
}

static const kvp_chat_message *message_at(const kvp_chat_message *messages, size_t stride, size_t i)
{
    return (const kvp_chat_message *)(const void *)((const char *)messages + i * stride);
}

static bool role_of(const kvp_chat_message *m, role *out)
{
    if (!m->role) return false;
    if (strcmp(m->role, "system") == 0) *out = SYSTEM;
    else if (strcmp(m->role, "user") == 0) *out = USER;
    else if (strcmp(m->role, "assistant") == 0) *out = ASSISTANT;
    else return false;
    return true;
}

static kvp_status check_messages(const kvp_chat_message *messages, size_t n, size_t stride,
                                 kvp_error *err)
{
    role r;
    if (stride < sizeof(kvp_chat_message) || stride % _Alignof(kvp_chat_message))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "stride: %zu bytes are not a kvp_chat_message",
                         stride);
    if (!messages && n) return kvp__fail(err, KVP_ERR_INVALID_ARG, "messages: NULL");
    for (size_t i = 0; i < n; i++) {
        const kvp_chat_message *m = message_at(messages, stride, i);
        if (!role_of(m, &r))
            return kvp__fail(err, KVP_ERR_INVALID_ARG,
                             "message %zu: the role \"%.40s\" is not system, user or assistant", i,
                             m->role ? m->role : "(null)");
        if (!m->text && m->text_bytes)
            return kvp__fail(err, KVP_ERR_INVALID_ARG, "message %zu: text: NULL", i);
        if (m->text_bytes > SIZE_MAX / 4)
            return kvp__fail(err, KVP_ERR_INVALID_ARG, "message %zu: text_bytes: %llu", i,
                             (unsigned long long)m->text_bytes);
    }
    return KVP_OK;
}

/* The system prompt that the template puts where the conversation has none. */
static void put_default_system(writer *w, const format *f)
{
    kvp__str text = {w->style->default_system, w->style->default_system_bytes};
    if (text.data) put_turn(w, f, SYSTEM, text);
    else if (w->style->dated_system) put_turn(w, f, SYSTEM, (kvp__str){"", 0});
}

/* One past the last message of a user. */
static size_t users_end(const kvp_chat_message *messages, size_t n, size_t stride)
{
    role r = ASSISTANT;
    while (n > 0 && role_of(message_at(messages, stride, n - 1), &r) && r != USER) n--;
    return n;
}

static void write_messages(writer *w, const format *f, const kvp_chat_message *messages, size_t n,
                           size_t stride)
{
    const kvp__mistral_style *m = &w->style->mistral;
    const kvp__str nothing = {"", 0};
    size_t end = users_end(messages, n, stride);
    for (size_t i = 0; i < n; i++) {
        const kvp_chat_message *message = message_at(messages, stride, i);
        kvp__str text = {message->text ? message->text : "", (size_t)message->text_bytes};
        role r = USER;
        role_of(message, &r);
        w->keep_system = m->system_last && i + 1 < end;
        if (r != USER && w->system.data && !w->keep_system) put_turn(w, f, USER, nothing);
        if (r == SYSTEM && f->folds_system && !m->system_mark) w->system = text;
        else put_turn(w, f, r, text);
    }
    if (w->system.data) put_turn(w, f, USER, nothing);
}

static void write_conversation(writer *w, uint32_t number, const kvp_chat_message *messages,
                               size_t n, size_t stride, uint32_t flags)
{
    const format *f = &formats[number];
    role first = USER;
    if (n > 0) role_of(messages, &first);
    if (flags & KVP_CHAT_CONTINUE) {
        f->end(w, ASSISTANT);
    } else {
        w->opening = true;
        if (f->has_bos || w->t->adds_bos) put_id(w, w->t->bos);
        if (n > 0 && first != SYSTEM) put_default_system(w, f);
    }
    write_messages(w, f, messages, n, stride);
    if (flags & KVP_CHAT_ADD_REPLY) f->begin(w, ASSISTANT);
    end_text(w);
}

kvp_status kvp__chat_tokenize(const kvp__tokenizer *t, uint32_t number,
                              const kvp_chat_message *messages, size_t n_messages, size_t stride,
                              uint32_t flags, int32_t *out, size_t capacity, size_t *count,
                              kvp_error *err)
{
    static const kvp__chat_style plain = {
        .mistral = {.space_after_open = true, .space_before_close = true}};
    if (stride == 0) stride = sizeof(kvp_chat_message);
    kvp_status s = check_messages(messages, n_messages, stride, err);
    if (s != KVP_OK) return s;
    if (flags & ~(KVP_CHAT_ADD_REPLY | KVP_CHAT_CONTINUE))
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "flags: 0x%x is not known", (unsigned)flags);
    if (number > KVP_CHAT_MISTRAL)
        return kvp__fail(err, KVP_ERR_INVALID_ARG, "format: %u is not a KVP_CHAT_ value",
                         (unsigned)number);
    if (number == 0) number = t->chat.format;
    if (number == KVP_CHAT_NONE)
        return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                         "the file names no chat format that is known; give one");
    if (!has_marks(t, number))
        return kvp__fail(err, KVP_ERR_UNSUPPORTED,
                         "chat format %u: its marks are not special tokens of this vocabulary",
                         (unsigned)number);
    writer w = {.t = t, .style = number == t->chat.format ? &t->chat : &plain,
                .ids = {.hooks = &t->hooks}, .err = err};
    write_conversation(&w, number, messages, n_messages, stride, flags);
    s = w.status;
    if (s == KVP_OK) s = kvp__ids_store(&w.ids, out, capacity, count, err);
    kvp__ids_free(&w.ids);
    kvp__free(&t->hooks, w.text, w.text_size);
    return s;
}
