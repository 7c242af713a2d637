#include "lookup.h"

#include <algorithm>

namespace cavectl {

namespace {

constexpr size_t kMostMatch = 32;   // a longer one says no more
constexpr size_t kMostPlaces = 24;  // that are looked at in an index
constexpr int32_t kNowhere = -1;

}  // namespace

Lookup::Lookup() {
  for (size_t length : {4, 2}) {
    indexes_.emplace_back(length);
    indexes_.back().last.assign(256, kNowhere);
  }
}

uint64_t Lookup::hash_of(size_t end, size_t length) const {
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (size_t i = end + 1 - length; i <= end; ++i) {
    hash = (hash ^ uint32_t(tokens_[i])) * 0xD6E8FEB86659FD93ull;
    hash ^= hash >> 32;
  }
  return hash;
}

void Lookup::index(Index& index, size_t end) {
  int32_t previous = kNowhere;
  if (end + 1 >= index.length) {
    int32_t& last = index.last[hash_of(end, index.length) & (index.last.size() - 1)];
    previous = last;
    last = int32_t(end);
  }
  index.previous.push_back(previous);
}

void Lookup::rehash(Index& index) {
  index.last.assign(2 * index.last.size(), kNowhere);
  const size_t count = index.previous.size();
  index.previous.clear();
  for (size_t end = 0; end < count; ++end) this->index(index, end);
}

void Lookup::append(const int32_t* tokens, size_t count) {
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  for (Index& each : indexes_) {
    for (size_t end = tokens_.size() - count; end < tokens_.size(); ++end) {
      if (end >= each.last.size()) rehash(each);
      index(each, end);
    }
  }
}

size_t Lookup::match(size_t end) const {
  size_t same = 0;
  for (size_t i = tokens_.size() - 1; same < kMostMatch && same <= end && tokens_[end - same] == tokens_[i - same]; ++same) {}
  return same;
}

void Lookup::find(const Index& index, size_t least_match, std::vector<Place>& places) const {
  const size_t last = tokens_.size() - 1;
  int32_t end = index.previous[last];
  for (size_t looked = 0; end != kNowhere && looked < kMostPlaces; ++looked, end = index.previous[size_t(end)]) {
    const size_t same = match(size_t(end));
    if (same < std::max(least_match, index.length)) continue;  // another run with this hash
    const auto known = [&](const Place& place) { return place.end == size_t(end); };
    if (std::none_of(places.begin(), places.end(), known)) places.push_back({size_t(end), same});
  }
}

// The text goes round where it ends: what is drafted so far is behind its end.
int32_t Lookup::token_behind(const Place& place, size_t steps, const std::vector<int32_t>& path) const {
  const size_t at = place.end + 1 + steps;
  return at < tokens_.size() ? tokens_[at] : path[at - tokens_.size()];
}

void Lookup::propose(size_t most_nodes, size_t most_depth, size_t most_branches, size_t least_match, std::vector<DraftNode>& out) {
  out.clear();
  places_.clear();
  if (tokens_.size() < 2 || !most_branches) return;
  for (const Index& index : indexes_) {
    if (places_.size() < most_branches) find(index, least_match, places_);
  }
  // stable: of equal matches the later place, which was found first
  std::stable_sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) { return a.match > b.match; });
  size_t branches = 0;
  for (const Place& place : places_) {
    if (branches == most_branches || out.size() >= most_nodes) return;
    int32_t node = -1;
    size_t before = out.size();
    path_.clear();
    for (size_t depth = 0; depth < most_depth; ++depth) {
      const int32_t token = token_behind(place, depth, path_);
      path_.push_back(token);
      size_t child = node < 0 ? 0 : size_t(node) + 1;
      while (child < before && !(out[child].parent == node && out[child].token == token)) ++child;
      if (child < before) {
        node = int32_t(child);
        continue;
      }
      if (out.size() >= most_nodes) return;
      before = 0;  // whatever comes now is new
      out.push_back({token, node, int32_t(place.match)});
      node = int32_t(out.size()) - 1;
    }
    branches += before == 0;
  }
}

}  // namespace cavectl
