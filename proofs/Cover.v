(** * The exact check that a mask set covers a threat (core/cover.py)

    The check looks at few placements: where a patch's edge crosses the edge of a mask, and of those only the hardest.
    It accepts a set if and only if every placement of the patches is hidden. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images Geometry MaskSets.
Import ListNotations.

(** ** Does a mask hide a patch? *)

Definition pixels_of (w : window) : list pixel := list_prod (seq (top w) (height w)) (seq (left w) (width w)).

Definition mask_hides (mask : list window) (patch : window) : bool := forallb (region_of mask) (pixels_of patch).

Lemma mask_hides_iff : forall mask patch,
  mask_hides mask patch = true <-> hides (region_of mask) (region_of [patch]).
Proof.
  intros mask patch. unfold mask_hides. rewrite forallb_forall. split.
  - intros H [r c] Hp. apply region_of_iff in Hp. destruct Hp as [w [[<-|[]] Hp]]. apply in_window_iff in Hp.
    apply H. apply in_prod_iff. rewrite !in_seq. simpl in *. lia.
  - intros H [r c] Hp. apply in_prod_iff in Hp. rewrite !in_seq in Hp. apply H. apply region_of_iff.
    exists patch. split; [now left|]. apply in_window_iff. simpl. lia.
Qed.

(** ** Representative placements *)

(** First positions at which a segment of length `side` stands differently to some edge. *)
Definition breaks (edges : list nat) (side start stop : nat) : list nat :=
  filter (fun t => (start <=? t) && (t + side <=? stop))
    (nodup Nat.eq_dec (start :: edges ++ map (fun e => e + 1 - side) edges)).

Lemma a_list_has_a_largest_element : forall l (a : nat), In a l -> exists m, In m l /\ forall b, In b l -> b <= m.
Proof.
  intros l. induction l as [|b rest IH]; [intros a []|intros _ _].
  destruct rest as [|c rest]; [exists b; split; [now left|]; now intros ? [->|[]]|].
  destruct (IH c (or_introl eq_refl)) as [m [Hm Hmax]]. destruct (le_lt_dec b m).
  - exists m. split; [now right|]. intros d [<-|Hd]; auto.
  - exists b. split; [now left|]. intros d [<-|Hd]; [lia|]. apply Hmax in Hd. lia.
Qed.

(** Position t stands to every edge as its representative does: the last break at or before it. *)
Lemma every_position_has_a_representative : forall edges side start stop t,
  1 <= side -> start <= t -> t + side <= stop ->
  exists r, In r (breaks edges side start stop) /\ r <= t /\
    forall e, In e edges -> (e <= t <-> e <= r) /\ (e < t + side <-> e < r + side).
Proof.
  intros edges side start stop t Hside Hstart Hstop.
  set (before := filter (fun b => b <=? t) (breaks edges side start stop)).
  assert (Hbefore : forall b, In b (start :: edges ++ map (fun e => e + 1 - side) edges) -> start <= b <= t ->
    In b before).
  { intros b Hb Hle. apply filter_In. split; [|apply Nat.leb_le; lia].
    apply filter_In. split; [now apply nodup_In|]. apply andb_true_iff. rewrite !Nat.leb_le. lia. }
  destruct (a_list_has_a_largest_element before start) as [r [Hr Hmax]].
  { apply Hbefore; [now left | lia]. }
  apply filter_In in Hr. destruct Hr as [Hr Hrt]. apply Nat.leb_le in Hrt.
  assert (Hrstart : start <= r).
  { apply filter_In in Hr. destruct Hr as [_ Hr]. apply andb_true_iff in Hr. rewrite !Nat.leb_le in Hr. lia. }
  exists r. repeat split; try assumption; try lia.
  - intro He. destruct (le_lt_dec start e); [|lia]. apply Hmax, Hbefore; [|lia].
    right. apply in_app_iff. now left.
  - intro He. destruct (le_lt_dec start (e + 1 - side)); [|lia].
    destruct (le_lt_dec (e + 1 - side) r); [lia|]. enough (e + 1 - side <= r) by lia.
    apply Hmax, Hbefore; [|lia]. right. apply in_app_iff. right. now apply in_map with (f := fun e => e + 1 - side).
Qed.

Definition row_edges (masks : list (list window)) : list nat :=
  flat_map (fun w => [top w; top w + height w]) (concat masks).

Definition column_edges (masks : list (list window)) : list nat :=
  flat_map (fun w => [left w; left w + width w]) (concat masks).

Definition representatives (masks : list (list window)) (s : shape) (room : window) : list window :=
  map (fun corner => Window (fst corner) (snd corner) (fst s) (snd s))
    (list_prod (breaks (row_edges masks) (fst s) (top room) (top room + height room))
               (breaks (column_edges masks) (snd s) (left room) (left room + width room))).

(** For every pixel of a segment there is one of its representative that lies on the same side of every edge. *)
Lemma segments_look_alike : forall edges side r t i,
  1 <= side -> r <= t ->
  (forall e, In e edges -> (e <= t <-> e <= r) /\ (e < t + side <-> e < r + side)) ->
  t <= i < t + side ->
  exists i', r <= i' < r + side /\ forall e, In e edges -> (e <= i' <-> e <= i).
Proof.
  intros edges side r t i Hside Hrt Hsame Hi. destruct (le_lt_dec (r + side) i) as [H|H].
  - exists (r + side - 1). split; [lia|]. intros e He. specialize (Hsame e He). lia.
  - exists i. split; [lia|]. tauto.
Qed.

Theorem representatives_stand_for_all_placements : forall masks s room patch,
  1 <= fst s -> 1 <= snd s -> placed s room patch ->
  exists w, In w (representatives masks s room) /\
    forall mask, In mask masks -> mask_hides mask w = true -> mask_hides mask patch = true.
Proof.
  intros masks s room patch Hh Hw [Eh [Ew [H1 [H2 [H3 H4]]]]].
  destruct (every_position_has_a_representative (row_edges masks) (fst s) (top room) (top room + height room)
    (top patch)) as [r [Hr [Hrt Hrows]]]; try lia.
  destruct (every_position_has_a_representative (column_edges masks) (snd s) (left room) (left room + width room)
    (left patch)) as [c [Hc [Hct Hcolumns]]]; try lia.
  exists (Window r c (fst s) (snd s)). split.
  { apply in_map_iff. exists (r, c). split; [reflexivity|]. now apply in_prod. }
  intros mask Hmask. unfold mask_hides. rewrite !forallb_forall. intros Hhides [i j] Hp.
  apply in_prod_iff in Hp. rewrite !in_seq, Eh, Ew in Hp. destruct Hp as [Hi Hj].
  destruct (segments_look_alike (row_edges masks) (fst s) r (top patch) i) as [i' [Hi' Hsame]]; auto.
  destruct (segments_look_alike (column_edges masks) (snd s) c (left patch) j) as [j' [Hj' Hsame']]; auto.
  assert (Hpixel : region_of mask (i', j') = true).
  { apply Hhides. apply in_prod_iff. rewrite !in_seq. simpl. lia. }
  apply region_of_iff in Hpixel. destruct Hpixel as [w [Hinw Hpixel]].
  apply region_of_iff. exists w. split; [assumption|].
  assert (Hw' : In w (concat masks)) by (apply in_concat; eauto).
  assert (Hedge : forall e, In e [top w; top w + height w] -> In e (row_edges masks))
    by (intros; apply in_flat_map; eauto).
  assert (Hedge' : forall e, In e [left w; left w + width w] -> In e (column_edges masks))
    by (intros; apply in_flat_map; eauto).
  apply in_window_iff in Hpixel. apply in_window_iff. simpl in *.
  pose proof (Hsame _ (Hedge _ (or_introl eq_refl))). pose proof (Hsame _ (Hedge _ (or_intror (or_introl eq_refl)))).
  pose proof (Hsame' _ (Hedge' _ (or_introl eq_refl))).
  pose proof (Hsame' _ (Hedge' _ (or_intror (or_introl eq_refl)))).
  lia.
Qed.

Lemma representatives_are_placed : forall masks s room w, In w (representatives masks s room) -> placed s room w.
Proof.
  intros masks s room w H. apply in_map_iff in H. destruct H as [[r c] [<- H]]. apply in_prod_iff in H.
  destruct H as [Hr Hc]. apply filter_In in Hr, Hc. destruct Hr as [_ Hr], Hc as [_ Hc].
  apply andb_true_iff in Hr, Hc. rewrite !Nat.leb_le in Hr, Hc. unfold placed, inside. simpl. lia.
Qed.

(** ** The hardest placements: rows of which masks hide them *)

Definition hidden_by (masks : list (list window)) (patch : window) : list bool :=
  map (fun mask => mask_hides mask patch) masks.

Definition entry (row : list bool) (i : nat) : bool := nth i row false.

Definition row_within (n : nat) (row row' : list bool) : bool :=
  forallb (fun i => implb (entry row i) (entry row' i)) (seq 0 n).

(** A row that contains another one is left out. The program looks at small rows first; any order will do. *)
Definition hardest (n : nat) (rows : list (list bool)) : list (list bool) :=
  fold_right (fun row kept => if existsb (fun k => row_within n k row) kept then kept else row :: kept) [] rows.

Lemma row_within_iff : forall n row row', row_within n row row' = true <->
  forall i, i < n -> entry row i = true -> entry row' i = true.
Proof.
  intros. unfold row_within. rewrite forallb_forall. split.
  - intros H i Hi Hrow. specialize (H i). rewrite in_seq, Hrow in H. apply H. lia.
  - intros H i Hi. apply in_seq in Hi. destruct (entry row i) eqn:E; [|reflexivity]. apply H; [lia|assumption].
Qed.

Lemma every_row_contains_a_hardest_one : forall n rows row,
  In row rows -> exists k, In k (hardest n rows) /\ row_within n k row = true.
Proof.
  intros n rows row. induction rows as [|first rest IH]; simpl; [tauto|].
  destruct (existsb _ _) eqn:E.
  - intros [<-|H]; [|now apply IH]. apply existsb_exists in E. exact E.
  - intros [<-|H].
    + exists first. split; [now left|]. now apply row_within_iff.
    + destruct (IH H) as [k [Hk Hwithin]]. exists k. split; [now right|assumption].
Qed.

Lemma hardest_rows_are_rows : forall n rows row, In row (hardest n rows) -> In row rows.
Proof.
  intros n rows row. induction rows as [|first rest IH]; simpl; [tauto|].
  destruct (existsb _ _); simpl; tauto.
Qed.

(** ** The check *)

Definition single_rows (masks : list (list window)) (shapes : list shape) (room : window) : list (list bool) :=
  hardest (length masks) (flat_map (fun s => map (hidden_by masks) (representatives masks s room)) shapes).

(** Some chosen mask hides the patches of all these rows at once. *)
Definition one_mask_for_all (n : nat) (chosen : list bool) (rows : list (list bool)) : bool :=
  existsb (fun i => entry chosen i && forallb (fun row => entry row i) rows) (seq 0 n).

Definition cover_check
    (masks : list (list window)) (shapes : list shape) (room : window) (patches : nat) (chosen : list bool) : bool :=
  forallb (one_mask_for_all (length masks) chosen) (combinations patches (single_rows masks shapes room)).

(** ** It is exact *)

Definition a_patch (shapes : list shape) (room w : window) : Prop := exists s, In s shapes /\ placed s room w.

Definition mask_of (masks : list (list window)) (i : nat) : list window := nth i masks [].

Lemma hidden_by_entry : forall masks patch i, i < length masks ->
  entry (hidden_by masks patch) i = mask_hides (mask_of masks i) patch.
Proof.
  intros masks patch i Hi. unfold entry, hidden_by, mask_of.
  rewrite nth_indep with (d' := mask_hides [] patch) by now rewrite map_length.
  now rewrite map_nth with (f := fun mask => mask_hides mask patch).
Qed.

Lemma every_patch_has_a_hardest_row : forall masks shapes room patch,
  (forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s) -> a_patch shapes room patch ->
  exists row, In row (single_rows masks shapes room) /\
    forall i, i < length masks -> entry row i = true -> mask_hides (mask_of masks i) patch = true.
Proof.
  intros masks shapes room patch Hpositive [s [Hs Hplaced]]. destruct (Hpositive s Hs) as [Hh Hw].
  destruct (representatives_stand_for_all_placements masks s room patch Hh Hw Hplaced) as [w [Hw' Hhides]].
  destruct (every_row_contains_a_hardest_one (length masks)
    (flat_map (fun s => map (hidden_by masks) (representatives masks s room)) shapes) (hidden_by masks w))
    as [row [Hrow Hwithin]].
  { apply in_flat_map. exists s. split; [assumption|]. now apply in_map. }
  exists row. split; [assumption|]. intros i Hi Hentry. apply Hhides; [now apply nth_In|].
  rewrite <- hidden_by_entry by assumption. rewrite row_within_iff in Hwithin. now apply Hwithin.
Qed.

Definition row_eq_dec : forall a b : list bool, {a = b} + {a <> b} := list_eq_dec bool_dec.

Lemma placements_together_have_listed_rows : forall masks shapes room windows,
  (forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s) -> Forall (a_patch shapes room) windows ->
  exists rows, In rows (combinations (length windows) (single_rows masks shapes room)) /\
    forall i, i < length masks -> (forall row, In row rows -> entry row i = true) ->
    forall w, In w windows -> mask_hides (mask_of masks i) w = true.
Proof.
  intros masks shapes room windows Hpositive Hpatches.
  assert (Hrows : exists rows, length rows = length windows /\ incl rows (single_rows masks shapes room) /\
    forall i, i < length masks -> (forall row, In row rows -> entry row i = true) ->
    forall w, In w windows -> mask_hides (mask_of masks i) w = true).
  { induction Hpatches as [|w rest Hw Hrest IH].
    - exists []. repeat split; [apply incl_nil_l | intros ? ? ? ? []].
    - destruct IH as [rows [Hl [Hincl Hhides]]].
      destruct (every_patch_has_a_hardest_row masks shapes room w Hpositive Hw) as [row [Hrow Hrowhides]].
      exists (row :: rows). split; [simpl in *; lia|]. split; [now apply incl_cons|].
      intros i Hi Hall v [<-|Hv].
      + apply Hrowhides; [assumption|]. apply Hall. now left.
      + apply Hhides; [assumption | | assumption]. intros. apply Hall. now right. }
  destruct Hrows as [rows [Hl [Hincl Hhides]]].
  destruct (combinations_hold_every_choice row_eq_dec _ rows Hincl) as [c [Hc Hperm]]. rewrite Hl in Hc.
  exists c. split; [assumption|]. intros i Hi Hall. apply Hhides; [assumption|].
  intros row Hrow. apply Hall. eapply Permutation_in; eassumption.
Qed.

Theorem cover_check_is_exact : forall masks shapes room patches chosen,
  (forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s) ->
  cover_check masks shapes room patches chosen = true <->
  forall windows, length windows = patches -> Forall (a_patch shapes room) windows ->
  exists i, i < length masks /\ entry chosen i = true /\
    forall w, In w windows -> hides (region_of (mask_of masks i)) (region_of [w]).
Proof.
  intros masks shapes room patches chosen Hpositive. unfold cover_check. rewrite forallb_forall. split.
  - (* Accepted: replace each patch by its hardest row. *)
    intros Hcheck windows Hlength Hpatches.
    destruct (placements_together_have_listed_rows masks shapes room windows Hpositive Hpatches)
      as [rows [Hrows Hhides]].
    rewrite Hlength in Hrows. specialize (Hcheck rows Hrows). apply existsb_exists in Hcheck.
    destruct Hcheck as [i [Hi Hall]]. apply in_seq in Hi. apply andb_true_iff in Hall.
    destruct Hall as [Hchosen Hall]. rewrite forallb_forall in Hall.
    exists i. split; [lia|]. split; [assumption|]. intros w Hw. apply mask_hides_iff. apply Hhides; auto. lia.
  - (* Every row is the row of a placement. *)
    intros Hcovers rows Hrows. apply combinations_have_only_choices in Hrows. destruct Hrows as [Hlength Hincl].
    assert (Hwindows : exists windows, map (hidden_by masks) windows = rows /\ Forall (a_patch shapes room) windows).
    { clear Hlength. induction rows as [|row rest IH]; [exists []; split; [reflexivity|constructor]|].
      destruct IH as [windows [E Hwindows]]; [intros r Hr; apply Hincl; now right|].
      assert (Hrow : In row (single_rows masks shapes room)) by (apply Hincl; now left).
      apply hardest_rows_are_rows, in_flat_map in Hrow. destruct Hrow as [s [Hs Hrow]].
      apply in_map_iff in Hrow. destruct Hrow as [w [<- Hw]]. exists (w :: windows).
      split; [simpl; congruence|]. constructor; [|assumption]. exists s. split; [assumption|].
      now apply representatives_are_placed in Hw. }
    destruct Hwindows as [windows [E Hpatches]].
    destruct (Hcovers windows) as [i [Hi [Hchosen Hhides]]].
    { rewrite <- Hlength, <- E. now rewrite map_length. }
    { assumption. }
    apply existsb_exists. exists i. split; [apply in_seq; lia|]. rewrite Hchosen. simpl.
    apply forallb_forall. intros row Hrow. rewrite <- E in Hrow. apply in_map_iff in Hrow.
    destruct Hrow as [w [<- Hw]]. rewrite hidden_by_entry by assumption. now apply mask_hides_iff, Hhides.
Qed.
