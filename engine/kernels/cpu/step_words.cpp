// From the words of a step to rows that are safe to run: every number is checked before anything is changed.
#include <algorithm>

#include "engine.h"
#include "slot_words.h"

namespace cavectl {

namespace {

// Takes words one by one; `short_of` remembers that there were too few.
class Words {
 public:
  Words(const int64_t* at, int64_t count) : at_(at), left_(count) {}

  int64_t next() {
    if (left_ <= 0) {
      short_of_ = true;
      return 0;
    }
    --left_;
    return *at_++;
  }
  // A count of things that take at least one word each.
  size_t count() {
    const int64_t n = next();
    if (n < 0 || n > left_) {
      short_of_ = true;
      return 0;
    }
    return size_t(n);
  }
  const int64_t* here() const { return at_; }
  int64_t left() const { return left_; }
  void skip(int64_t words) {
    at_ += words;
    left_ -= words;
  }
  bool short_of() const { return short_of_; }

 private:
  const int64_t* at_;
  int64_t left_;
  bool short_of_ = false;
};

constexpr const char* kTooShort = "the step's words end early";

std::string number(int64_t n) { return std::to_string(n); }

}  // namespace

struct StepReader {
  const Engine& engine;
  Words words;
  const double* numbers;
  int64_t number_count;
  const uint8_t* masks;
  int64_t mask_bytes;
  Step& step;
  std::vector<std::vector<size_t>> page_starts;  // of each row and group, in step.page_numbers

  std::string read() {
    std::string wrong = read_slots();
    if (wrong.empty()) wrong = read_copies();
    if (wrong.empty()) wrong = read_rows();
    if (wrong.empty() && words.left()) wrong = "the step has words behind its last row";
    if (wrong.empty()) place_pages();
    return wrong;
  }

  std::string read_slots() {
    for (size_t n = words.count(); n; --n) {
      const int64_t slot = words.next();
      if (!engine.slot(slot)) return "sampling slot " + number(slot) + " is outside 0.." + number(int64_t(engine.model().max_slots) - 1);
      step.closed.push_back(int32_t(slot));
    }
    for (size_t n = words.count(); n; --n) {
      OpenedSlot opened;
      int64_t used_words = 0, used_numbers = 0;
      const char* wrong = parse_slot(words.here(), words.left(), numbers, number_count, int32_t(engine.model().vocab), opened.slot,
                                     opened.index, used_words, used_numbers);
      if (wrong) return wrong;
      if (!engine.slot(opened.index)) {
        return "sampling slot " + number(opened.index) + " is outside 0.." + number(int64_t(engine.model().max_slots) - 1);
      }
      opened.slot.open = true;
      words.skip(used_words);
      numbers += used_numbers;
      number_count -= used_numbers;
      step.opened.push_back(std::move(opened));
    }
    return words.short_of() ? kTooShort : "";
  }

  std::string read_copies() {
    std::vector<std::pair<size_t, size_t>> sources, targets;
    for (size_t n = words.count(); n; --n) {
      const int64_t group = words.next(), source = words.next(), target = words.next();
      if (words.short_of()) return kTooShort;
      if (group < 0 || size_t(group) >= engine.groups() || source < 0 || size_t(source) >= engine.pages(size_t(group)) || target < 0 ||
          size_t(target) >= engine.pages(size_t(group))) {
        return "a page copy is outside the pool";
      }
      step.copies.push_back({size_t(group), size_t(source), size_t(target)});
      sources.emplace_back(group, source);
      targets.emplace_back(group, target);
    }
    std::sort(targets.begin(), targets.end());
    bool clash = std::adjacent_find(targets.begin(), targets.end()) != targets.end();
    for (const auto& source : sources) clash = clash || std::binary_search(targets.begin(), targets.end(), source);
    if (clash) return "a page is the target of two copies, or both source and target";
    return words.short_of() ? kTooShort : "";
  }

  std::string read_rows() {
    for (size_t n = words.count(); n; --n) {
      std::string wrong = read_row();
      if (!wrong.empty()) return wrong;
    }
    return words.short_of() ? kTooShort : "";
  }

  // The slot as it will be in this step.
  const Slot* slot_of(int64_t index) const {
    const Slot* found = engine.slot(index);
    if (!found) return nullptr;
    for (auto opened = step.opened.rbegin(); opened != step.opened.rend(); ++opened) {
      if (opened->index == index) return &opened->slot;
    }
    if (std::find(step.closed.begin(), step.closed.end(), index) != step.closed.end()) return nullptr;
    return found->open ? found : nullptr;
  }

  std::string read_row() {
    StepRow row;
    const int64_t position = words.next();
    const size_t count = words.count();
    const int64_t slot = words.next(), mask = words.next();
    const size_t drafts = words.count();
    if (words.short_of() || int64_t(count) > words.left()) return kTooShort;
    if (position < 0 || position > INT32_MAX - int64_t(count)) return "a row has a negative position, or one too large";
    const Slot* state = nullptr;
    if (slot >= 0) {
      state = slot_of(slot);
      if (!state) return "sampling slot " + number(slot) + " is not open";
    } else if (slot != -1) {
      return "a row's sampling slot is no slot";
    }
    row.position = size_t(position);
    row.start = step.tokens.size();
    row.count = count;
    row.slot = int32_t(slot);
    if (mask >= 0) {
      const int64_t needed = int64_t(engine.model().vocab + 7) / 8;
      if (mask > mask_bytes - needed) return "a mask must have " + number(needed) + " bytes";
      row.mask = masks + mask;
    }
    std::string wrong = read_tokens(row, state);
    if (wrong.empty() && drafts) wrong = read_tree(row, drafts);
    if (wrong.empty()) wrong = read_pages(row);
    step.rows.push_back(std::move(row));
    return wrong;
  }

  std::string read_tokens(const StepRow& row, const Slot* state) {
    for (size_t i = 0; i < row.count; ++i) {
      int64_t token = words.next();
      if (token == -1 && row.count == 1) {
        if (!state || state->tokens.size() <= state->prompt_tokens) return "a row continues from a token that was never sampled";
        token = state->tokens.back();
      }
      if (token < 0 || uint64_t(token) >= engine.model().vocab) {
        return "a row has no tokens, or one outside the vocabulary of " + number(int64_t(engine.model().vocab));
      }
      step.tokens.push_back(int32_t(token));
    }
    return row.count ? "" : "a row has no tokens, or one outside the vocabulary of " + number(int64_t(engine.model().vocab));
  }

  std::string read_tree(StepRow& row, size_t drafts) {
    if (drafts >= row.count) return "a draft tree must follow a plain token, parents before children";
    if (row.slot < 0) return "a draft tree needs a sampling slot";
    if (row.mask) return "a draft tree and a mask do not go together";
    for (size_t i = 0; i < drafts; ++i) {
      const int64_t parent = words.next();
      if (parent < -1 || parent >= int64_t(i)) return "a draft tree must follow a plain token, parents before children";
      row.parents.push_back(int32_t(parent));
    }
    return words.short_of() ? kTooShort : "";
  }

  std::string read_pages(const StepRow& row) {
    const size_t end = row.position + row.count;
    page_starts.emplace_back();
    for (size_t group = 0; group < engine.groups(); ++group) {
      const size_t count = words.count(), total = engine.pages(group), window = engine.model().windows[group];
      if (words.short_of()) return kTooShort;
      if (count * kPageTokens < end) return "a row's pages do not hold its positions up to " + number(int64_t(end) - 1);
      const size_t first = window && row.position + 1 > window ? (row.position + 1 - window) / kPageTokens : 0;
      const size_t last = (end + kPageTokens - 1) / kPageTokens;
      page_starts.back().push_back(step.page_numbers.size());
      for (size_t i = 0; i < count; ++i) {
        const int64_t page = words.next();
        const bool needed = i >= first && i < last;
        if (needed ? page < 0 || uint64_t(page) >= total : page != -1 && (page < 0 || uint64_t(page) >= total)) {
          return "a page is outside the pool of " + number(int64_t(total));
        }
        step.page_numbers.push_back(int32_t(page));
      }
      // a tile reads page numbers in fours
      for (size_t i = count; i % kTilePages; ++i) step.page_numbers.push_back(-1);
    }
    return "";
  }

  void place_pages() {
    for (size_t r = 0; r < step.rows.size(); ++r) {
      for (size_t start : page_starts[r]) step.rows[r].pages.push_back(step.page_numbers.data() + start);
    }
  }
};

std::string Engine::read_step(const int64_t* words, int64_t word_count, const double* numbers, int64_t number_count,
                              const uint8_t* masks, int64_t mask_bytes, Step& step) const {
  StepReader reader{*this, Words(words, word_count), numbers, number_count, masks, mask_bytes, step, {}};
  return reader.read();
}

}  // namespace cavectl
