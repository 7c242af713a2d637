// The C ABI of prompt lookup.
#include <new>

#include "cavectl.h"
#include "lookup.h"

struct cavectl_lookup {
  cavectl::Lookup text;
  std::vector<cavectl::DraftNode> nodes;
};

extern "C" {

cavectl_lookup* cavectl_lookup_open(void) {
  try {
    return new cavectl_lookup;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void cavectl_lookup_close(cavectl_lookup* text) { delete text; }

int64_t cavectl_lookup_size(const cavectl_lookup* text) { return int64_t(text->text.size()); }

int64_t cavectl_lookup_propose(cavectl_lookup* text, const int32_t* tokens, uint64_t count, uint64_t most_nodes, uint64_t most_depth,
                               uint64_t most_branches, uint64_t least_match, int32_t* nodes) {
  try {
    text->text.append(tokens, count);
    text->text.propose(most_nodes, most_depth, most_branches, least_match, text->nodes);
  } catch (const std::bad_alloc&) {
    return CAVECTL_MEMORY;
  }
  for (const cavectl::DraftNode& node : text->nodes) {
    *nodes++ = node.token;
    *nodes++ = node.parent;
    *nodes++ = node.match;
  }
  return int64_t(text->nodes.size());
}

}  // extern "C"
