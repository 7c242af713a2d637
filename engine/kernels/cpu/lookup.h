// Prompt lookup: drafts that go on as the text went on before, after the same last tokens.
//
// Owned here: one sequence's tokens and where short runs of them were seen. Not here: whether a draft is worth its cost. Finding and
// appending take microseconds however long the text is: only the latest few places are looked at. Invariant: parents come before
// their children, and the first branch is the likeliest.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cavectl {

struct DraftNode {
  int32_t token;
  int32_t parent;  // among the nodes; -1: the text's last token
  int32_t match;   // how many tokens before it are the same where it was seen
};

class Lookup {
 public:
  Lookup();

  void append(const int32_t* tokens, size_t count);
  size_t size() const { return tokens_.size(); }

  // At most `most_nodes` nodes, none deeper than `most_depth`, of at most `most_branches` places where at least `least_match` tokens
  // are the same. Replaces what `out` holds.
  void propose(size_t most_nodes, size_t most_depth, size_t most_branches, size_t least_match, std::vector<DraftNode>& out);

 private:
  // Where runs of `length` tokens end: the last place of each, and from there the one before.
  struct Index {
    explicit Index(size_t run) : length(run) {}
    size_t length;
    std::vector<int32_t> last;      // by hash; a power of two of them
    std::vector<int32_t> previous;  // by place: an earlier one with the same hash, -1: none
  };

  struct Place {
    size_t end;    // of the run that was seen: the draft begins behind it
    size_t match;  // tokens that are the same, going back
  };

  uint64_t hash_of(size_t end, size_t length) const;
  void index(Index& index, size_t end);
  void rehash(Index& index);
  size_t match(size_t end) const;
  void find(const Index& index, size_t least_match, std::vector<Place>& places) const;
  int32_t token_behind(const Place& place, size_t steps, const std::vector<int32_t>& path) const;

  std::vector<int32_t> tokens_;
  std::vector<Index> indexes_;  // the longest runs first
  std::vector<Place> places_;
  std::vector<int32_t> path_;
};

}  // namespace cavectl
