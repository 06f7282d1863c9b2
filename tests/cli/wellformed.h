/* Whether a text is what it says it is. NULL if so, else where it stops being so. */
#ifndef TESTS_CLI_WELLFORMED_H
#define TESTS_CLI_WELLFORMED_H

/* One JSON value and white space. */
const char *not_json(const char *text);
/* A document whose elements are all closed in order, with quoted attributes, known entities, and
 * one element outermost; a document type may come first. */
const char *not_xml(const char *text);

#endif
