/*
 * The packed file: a model's weights as they lie in memory once they are placed, kept for the next
 * process, which then reads them and packs nothing.
 *
 *     4,096 bytes of header, zero behind its end
 *     the image, padded to whole pieces
 *     a sum for each piece
 *
 * A file belongs to a model file of one size and time of change, with this table of tensors, and to one
 * layout of panels (KVP__PANEL_LAYOUT); anything else is not read. It is read, not mapped: so a file
 * that is cut short under us is an error and not a signal, and the weights lie in large pages.
 *
 * What a file can do to who reads it is give wrong numbers, as a model file can: every size comes from
 * the model.
 */
#ifndef KVP_CPU_IMAGE_H
#define KVP_CPU_IMAGE_H

#include "device/device.h"

/* Fills `memory` (`bytes` long, zero) from the packed file that `how` names. OK; CANCELLED; or another
 * error, which says why the file is of no use: memory then holds anything. */
kvp_status kvp__image_read(const kvp__model *m, const kvp__place *how, kvp__team *team, void *memory,
                           uint64_t bytes, kvp_error *err);
/* Writes the packed file, beside its place first, then moved there: whoever looks finds a whole file
 * or none. An error leaves what was there. */
kvp_status kvp__image_write(const kvp__model *m, const kvp__place *how, const void *memory,
                            uint64_t bytes, kvp_error *err);

#endif
