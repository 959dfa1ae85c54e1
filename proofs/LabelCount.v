(** * How many labels a certificate takes

    LowerBound.v says that for every two placements some member of the family hides both. Where the members are unions
    of two squares, as for the paper's masks, that takes at least 570 labels; ours takes 666. *)

From Coq Require Import List Bool Arith Lia FinFun.
From PatchCleanser Require Import Images Geometry MaskSets Cover RowCertificate DoubleMasking SourceGrid LowerBound.
Import ListNotations.

(** If no member hides two of these pairs, then each pair has a member of its own. *)
Lemma each_pair_needs_a_member_of_its_own : forall {pair member : Type} (serves : member -> pair -> Prop) family pairs,
  NoDup pairs ->
  (forall q, In q pairs -> exists m, In m family /\ serves m q) ->
  (forall m q q', In m family -> In q pairs -> In q' pairs -> serves m q -> serves m q' -> q = q') ->
  length pairs <= length family.
Proof.
  intros pair member serves family pairs Hnodup Hserved Hone.
  assert (Hnumbers : exists numbers,
    Forall2 (fun q i => exists m, nth_error family i = Some m /\ serves m q) pairs numbers).
  { clear Hnodup Hone. induction pairs as [|q rest IH]; [exists []; constructor|].
    destruct IH as [numbers Hnumbers]; [intros; apply Hserved; now right|].
    destruct (Hserved q (or_introl eq_refl)) as [m [Hm Hserves]]. apply In_nth_error in Hm. destruct Hm as [i Hi].
    exists (i :: numbers). constructor; eauto. }
  destruct Hnumbers as [numbers Hnumbers].
  assert (Hlength : length pairs = length numbers) by (clear -Hnumbers; induction Hnumbers; simpl; congruence).
  rewrite Hlength, <- (seq_length (length family) 0). apply NoDup_incl_length.
  - clear Hserved Hlength. revert Hnodup Hone. induction Hnumbers as [|q i rest numbers [m [Hi Hserves]] Hrest IH];
      intros Hnodup Hone; [constructor|]. inversion_clear Hnodup as [|? ? Hnew Hrestnodup]. constructor.
    + intro Hin. apply Hnew. clear IH Hrestnodup Hnew.
      assert (Hsome : exists q', In q' rest /\ serves m q').
      { clear Hone. induction Hrest as [|q' j rest numbers [m' [Hj Hs]] _ IHrest]; [destruct Hin|].
        destruct Hin as [->|Hin]; [exists q'; split; [now left|]; congruence|].
        destruct (IHrest Hin) as [r [Hr Hr']]. exists r. split; [now right|assumption]. }
      destruct Hsome as [q' [Hq' Hs]].
      replace q with q'; [assumption|]. apply (Hone m); auto; [eapply nth_error_In; eassumption| now right | now left].
    + apply IH; [assumption|]. intros m' a b Hm' Ha Hb. apply Hone; auto; now right.
  - intros i Hin. clear -Hnumbers Hin. induction Hnumbers as [|q j rest numbers [m [Hj _]] _ IH]; [destruct Hin|].
    destruct Hin as [->|Hin]; [|now apply IH]. apply in_seq.
    assert (i < length family) by (apply nth_error_Some; congruence). lia.
Qed.

(** ** Unions of two squares

    Patches of p x p px at the corners (i s, j s). Two masks of at most p + s - 1 px a side hide two patches that are
    not neighbours, and at most one between them. *)
Section TwoSquares.
  Variables p s : nat.
  Hypothesis patch_is_positive : 1 <= p.
  Hypothesis stride_is_positive : 1 <= s.
  Hypothesis patch_is_small : p <= s + 1.

  Definition corner := (nat * nat)%type.

  Definition patch_at (u : corner) : window := Window (fst u * s) (snd u * s) p p.

  Definition at_most_a_mask (w : window) : Prop := height w <= p + s - 1 /\ width w <= p + s - 1.

  Definition neighbours (u v : corner) : Prop :=
    (fst u = fst v /\ (snd u = S (snd v) \/ snd v = S (snd u))) \/
    (snd u = snd v /\ (fst u = S (fst v) \/ fst v = S (fst u))).

  Variables A B : window.
  Hypothesis A_is_small : at_most_a_mask A.
  Hypothesis B_is_small : at_most_a_mask B.

  Definition hidden (u : corner) : Prop := hides (region_of [A; B]) (region_of [patch_at u]).

  (** Along one axis, for a segment [start, start + length): *)
  Definition holds (start length i : nat) : Prop := start <= i * s /\ i * s + p <= start + length.

  Definition together (start length start' length' i : nat) : Prop :=
    start <= start' + length' /\ start' <= start + length /\
    Nat.min start start' <= i * s /\ i * s + p <= Nat.max (start + length) (start' + length').

  Lemma a_short_segment_holds_one : forall start length i j,
    length <= p + s - 1 -> holds start length i -> holds start length j -> i = j.
  Proof.
    intros start length i j Hl [H1 H2] [H3 H4].
    destruct (lt_eq_lt_dec i j) as [[H|H]|H]; [|assumption|]; exfalso.
    - assert (S i * s <= j * s) by (apply Nat.mul_le_mono_r; lia). simpl in *. lia.
    - assert (S j * s <= i * s) by (apply Nat.mul_le_mono_r; lia). simpl in *. lia.
  Qed.

  Lemma two_that_hold_the_same_hold_no_other_together : forall a l b l' i j,
    l <= p + s - 1 -> l' <= p + s - 1 -> holds a l i -> holds b l' i -> together a l b l' j -> i = j.
  Proof.
    intros a l b l' i j Hl Hl' [H1 H2] [H3 H4] [H5 [H6 [H7 H8]]].
    destruct (lt_eq_lt_dec i j) as [[H|H]|H]; [|assumption|]; exfalso.
    - assert (S i * s <= j * s) by (apply Nat.mul_le_mono_r; lia). simpl in *. lia.
    - assert (S j * s <= i * s) by (apply Nat.mul_le_mono_r; lia). simpl in *. lia.
  Qed.

  Lemma two_hold_three_in_a_row_together : forall a l b l' i j,
    l <= p + s - 1 -> l' <= p + s - 1 -> together a l b l' i -> together a l b l' j -> i <= j + 2.
  Proof.
    intros a l b l' i j Hl Hl' [H5 [H6 [H7 H8]]] [_ [_ [H7' H8']]].
    destruct (le_lt_dec i (j + 2)) as [|H]; [assumption|exfalso].
    assert (S (S (S j)) * s <= i * s) by (apply Nat.mul_le_mono_r; lia). simpl in *. lia.
  Qed.

  Definition rows (w : window) (u : corner) : Prop := holds (top w) (height w) (fst u).
  Definition columns (w : window) (u : corner) : Prop := holds (left w) (width w) (snd u).
  Definition side_by_side (u : corner) : Prop := together (left A) (width A) (left B) (width B) (snd u).
  Definition one_above_the_other (u : corner) : Prop := together (top A) (height A) (top B) (height B) (fst u).

  Lemma how_two_windows_hide_a_patch : forall u, hidden u ->
    (rows A u /\ columns A u) \/ (rows B u /\ columns B u) \/
    (rows A u /\ rows B u /\ side_by_side u) \/ (columns A u /\ columns B u /\ one_above_the_other u).
  Proof.
    intros [i j] H. unfold hidden in H.
    assert (Hpixel : forall r c, i * s <= r < i * s + p -> j * s <= c < j * s + p ->
      (top A <= r < top A + height A /\ left A <= c < left A + width A) \/
      (top B <= r < top B + height B /\ left B <= c < left B + width B)).
    { intros r c Hr Hc. assert (Hp : region_of [patch_at (i, j)] (r, c) = true).
      { apply region_of_iff. eexists. split; [now left|]. apply in_window_iff. simpl. lia. }
      apply H, region_of_iff in Hp. destruct Hp as [w [[<-|[<-|[]]] Hp]];
        apply in_window_iff in Hp; simpl in Hp; auto. }
    clear H. unfold rows, columns, side_by_side, one_above_the_other, holds, together. cbn [fst snd].
    set (t := i * s) in *. set (l := j * s) in *. clearbody t l. clear A_is_small B_is_small.
    (* Each corner lies in one of the two; where one window ends within the patch, the other goes on. *)
    destruct (Hpixel t l ltac:(lia) ltac:(lia)), (Hpixel t (l + p - 1) ltac:(lia) ltac:(lia)),
      (Hpixel (t + p - 1) l ltac:(lia) ltac:(lia)), (Hpixel (t + p - 1) (l + p - 1) ltac:(lia) ltac:(lia));
      try (left; repeat split; lia); try (right; left; repeat split; lia).
    - (* The upper corners in A, the lower ones in B. *)
      right; right; right. destruct (le_lt_dec (t + p) (top A + height A)); [repeat split; lia|].
      destruct (Hpixel (top A + height A) l ltac:(lia) ltac:(lia)); repeat split; lia.
    - (* The left corners in A, the right ones in B. *)
      right; right; left. destruct (le_lt_dec (l + p) (left A + width A)); [repeat split; lia|].
      destruct (Hpixel t (left A + width A) ltac:(lia) ltac:(lia)); repeat split; lia.
    - (* The left corners in B, the right ones in A. *)
      right; right; left. destruct (le_lt_dec (l + p) (left B + width B)); [repeat split; lia|].
      destruct (Hpixel t (left B + width B) ltac:(lia) ltac:(lia)); repeat split; lia.
    - (* The upper corners in B, the lower ones in A. *)
      right; right; right. destruct (le_lt_dec (t + p) (top B + height B)); [repeat split; lia|].
      destruct (Hpixel (top B + height B) l ltac:(lia) ltac:(lia)); repeat split; lia.
  Qed.

  Lemma beside_a_straddled_patch : forall u v, rows A u -> rows B u -> side_by_side u -> hidden v ->
    fst u = fst v /\ side_by_side v.
  Proof.
    intros u v HA HB [Ht [Ht' _]] Hv. destruct A_is_small as [hA wA], B_is_small as [hB wB].
    destruct (how_two_windows_hide_a_patch v Hv) as [[H H']|[[H H']|[[H [H' H'']]|[H [H' H'']]]]].
    - split; [now apply (a_short_segment_holds_one (top A) (height A))|].
      unfold side_by_side, together, columns, holds in *. lia.
    - split; [now apply (a_short_segment_holds_one (top B) (height B))|].
      unfold side_by_side, together, columns, holds in *. lia.
    - split; [now apply (a_short_segment_holds_one (top A) (height A)) | assumption].
    - split.
      + now apply (two_that_hold_the_same_hold_no_other_together (top A) (height A) (top B) (height B)).
      + unfold side_by_side, together, columns, holds in *. lia.
  Qed.

  Lemma below_a_straddled_patch : forall u v, columns A u -> columns B u -> one_above_the_other u -> hidden v ->
    snd u = snd v /\ one_above_the_other v.
  Proof.
    intros u v HA HB [Ht [Ht' _]] Hv. destruct A_is_small as [hA wA], B_is_small as [hB wB].
    destruct (how_two_windows_hide_a_patch v Hv) as [[H H']|[[H H']|[[H [H' H'']]|[H [H' H'']]]]].
    - split; [now apply (a_short_segment_holds_one (left A) (width A))|].
      unfold one_above_the_other, together, rows, holds in *. lia.
    - split; [now apply (a_short_segment_holds_one (left B) (width B))|].
      unfold one_above_the_other, together, rows, holds in *. lia.
    - split.
      + now apply (two_that_hold_the_same_hold_no_other_together (left A) (width A) (left B) (width B)).
      + unfold one_above_the_other, together, rows, holds in *. lia.
    - split; [now apply (a_short_segment_holds_one (left A) (width A)) | assumption].
  Qed.

  Lemma three_close_numbers : forall a b c,
    a <= b + 2 -> b <= a + 2 -> a <= c + 2 -> c <= a + 2 -> b <= c + 2 -> c <= b + 2 ->
    a <> b -> a <> c -> b <> c -> ~ (a = S b \/ b = S a) -> a + b = 2 * c.
  Proof. lia. Qed.

  Definition midpoint (u v w : corner) : Prop := fst u + fst v = 2 * fst w /\ snd u + snd v = 2 * snd w.

  (** Three hidden patches stand in a row. *)
  Lemma three_hidden_patches_stand_in_a_row : forall u v w,
    hidden u -> hidden v -> hidden w -> u <> v -> u <> w -> v <> w -> ~ neighbours u v -> midpoint u v w.
  Proof.
    intros u v w Hu Hv Hw Huv Huw Hvw Hfar.
    assert (Hdistinct : forall a b : corner, a <> b -> fst a = fst b -> snd a <> snd b).
    { intros [] [] Hab E E'. simpl in *. congruence. }
    assert (Hdistinct' : forall a b : corner, a <> b -> snd a = snd b -> fst a <> fst b).
    { intros [] [] Hab E E'. simpl in *. congruence. }
    assert (Hstraddle : forall a,
      (rows A a /\ rows B a /\ side_by_side a) \/ (columns A a /\ columns B a /\ one_above_the_other a) ->
      midpoint u v w).
    { destruct A_is_small as [hA wA], B_is_small as [hB wB].
      intros a [[H1 [H2 H3]]|[H1 [H2 H3]]]; unfold neighbours in Hfar.
      - destruct (beside_a_straddled_patch a u H1 H2 H3 Hu) as [Eu Su].
        destruct (beside_a_straddled_patch a v H1 H2 H3 Hv) as [Ev Sv].
        destruct (beside_a_straddled_patch a w H1 H2 H3 Hw) as [Ew Sw].
        split; [lia|].
        apply three_close_numbers;
          try (now apply (two_hold_three_in_a_row_together (left A) (width A) (left B) (width B)));
          try (apply Hdistinct; congruence). intro. apply Hfar. left. split; [congruence | tauto].
      - destruct (below_a_straddled_patch a u H1 H2 H3 Hu) as [Eu Su].
        destruct (below_a_straddled_patch a v H1 H2 H3 Hv) as [Ev Sv].
        destruct (below_a_straddled_patch a w H1 H2 H3 Hw) as [Ew Sw].
        split; [|lia].
        apply three_close_numbers;
          try (now apply (two_hold_three_in_a_row_together (top A) (height A) (top B) (height B)));
          try (apply Hdistinct'; congruence). intro. apply Hfar. right. split; [congruence | tauto]. }
    assert (Hequal : forall a b : corner, fst a = fst b /\ snd a = snd b -> a = b).
    { intros [] [] [E E']. simpl in *. congruence. }
    (* Without a straddled patch, two of the three lie in the same window. *)
    assert (Halone : forall a b, (rows A a /\ columns A a) /\ (rows A b /\ columns A b) \/
      (rows B a /\ columns B a) /\ (rows B b /\ columns B b) -> fst a = fst b /\ snd a = snd b).
    { destruct A_is_small as [hA wA], B_is_small as [hB wB].
      intros a b [[[H1 H2] [H3 H4]]|[[H1 H2] [H3 H4]]]; split.
      - now apply (a_short_segment_holds_one (top A) (height A)).
      - now apply (a_short_segment_holds_one (left A) (width A)).
      - now apply (a_short_segment_holds_one (top B) (height B)).
      - now apply (a_short_segment_holds_one (left B) (width B)). }
    destruct (how_two_windows_hide_a_patch u Hu) as [Cu|[Cu|Cu]]; [| |now apply (Hstraddle u)];
      (destruct (how_two_windows_hide_a_patch v Hv) as [Cv|[Cv|Cv]]; [| |now apply (Hstraddle v)]);
      (destruct (how_two_windows_hide_a_patch w Hw) as [Cw|[Cw|Cw]]; [| |now apply (Hstraddle w)]);
      exfalso; first [apply Huv, Hequal, Halone; tauto | apply Huw, Hequal, Halone; tauto
        | apply Hvw, Hequal, Halone; tauto].
  Qed.

  Lemma two_masks_serve_one_far_pair : forall u v u' v',
    hidden u -> hidden v -> hidden u' -> hidden v' ->
    u <> v -> u' <> v' -> ~ neighbours u v -> ~ neighbours u' v' ->
    (u = u' /\ v = v') \/ (u = v' /\ v = u').
  Proof.
    intros u v u' v' Hu Hv Hu' Hv' Huv Hu'v' Hfar Hfar'.
    assert (eq_dec : forall a b : corner, {a = b} + {a <> b}) by (repeat decide equality).
    assert (Hsym : forall a b, neighbours a b -> neighbours b a) by (unfold neighbours; intuition).
    assert (Hequal : forall a b : corner, fst a = fst b -> snd a = snd b -> a = b).
    { intros [] [] E E'. simpl in *. congruence. }
    assert (Hrow := three_hidden_patches_stand_in_a_row).
    (* A corner shared by both pairs: each of the two others would stand in the middle. *)
    assert (Hshared : forall a b c, hidden a -> hidden b -> hidden c -> a <> b -> a <> c ->
      ~ neighbours a b -> ~ neighbours a c -> b = c).
    { intros a b c Ha Hb Hc Hab Hac Nab Nac. destruct (eq_dec b c) as [|Hbc]; [assumption|exfalso].
      destruct (Hrow a b c) as [H1 H2]; auto. destruct (Hrow a c b) as [H3 H4]; auto.
      apply Hbc, Hequal; lia. }
    destruct (eq_dec u u') as [->|Huu']; [left; eauto|].
    destruct (eq_dec u v') as [->|Huv']; [right; split; [reflexivity|]; apply (Hshared v'); auto|].
    destruct (eq_dec v u') as [->|Hvu']; [right; split; [|reflexivity]; apply (Hshared u'); auto|].
    destruct (eq_dec v v') as [->|Hvv']; [left; split; [|reflexivity]; apply (Hshared v'); auto|].
    (* Four corners: both u' and v' would stand in the middle of u and v. *)
    exfalso. destruct (Hrow u v u') as [H1 H2]; auto. destruct (Hrow u v v') as [H3 H4]; auto.
    apply Hu'v', Hequal; lia.
  Qed.
End TwoSquares.

(** ** The bound *)

Definition adjacent (u v : corner) : bool :=
  ((fst u =? fst v) && ((snd u =? S (snd v)) || (snd v =? S (snd u)))) ||
  ((snd u =? snd v) && ((fst u =? S (fst v)) || (fst v =? S (fst u)))).

(** All pairs of k x k corners that are not neighbours, each once. *)
Definition precedes (u v : corner) : bool := (fst u <? fst v) || ((fst u =? fst v) && (snd u <? snd v)).

Definition corners (k : nat) : list corner := list_prod (seq 0 k) (seq 0 k).

Definition far_pairs (k : nat) : list (corner * corner) :=
  filter (fun q => precedes (fst q) (snd q) && negb (adjacent (fst q) (snd q))) (list_prod (corners k) (corners k)).

Lemma NoDup_app : forall {A} (l l' : list A),
  NoDup l -> NoDup l' -> (forall a, In a l -> ~ In a l') -> NoDup (l ++ l').
Proof.
  intros A l l' H H' Hapart. induction H as [|a l Ha Hl IH]; simpl; [assumption|].
  constructor.
  - intro Hin. apply in_app_iff in Hin. destruct Hin as [|Hin]; [contradiction|].
    now apply (Hapart a (or_introl eq_refl)).
  - apply IH. intros b Hb. apply Hapart. now right.
Qed.

Lemma NoDup_list_prod : forall {A B} (l : list A) (l' : list B), NoDup l -> NoDup l' -> NoDup (list_prod l l').
Proof.
  intros A B l l' H H'. induction H as [|a l Ha Hl IH]; simpl; [constructor|].
  apply NoDup_app; [apply Injective_map_NoDup; [intros b c [=]; assumption | assumption] | assumption |].
  intros [a' b] Hin Hin'. apply in_map_iff in Hin. destruct Hin as [b' [[= <- <-] _]].
  apply in_prod_iff in Hin'. tauto.
Qed.

Lemma adjacent_iff : forall u v, adjacent u v = true <-> neighbours u v.
Proof.
  intros. unfold adjacent, neighbours. rewrite orb_true_iff, !andb_true_iff, !orb_true_iff, !Nat.eqb_eq. tauto.
Qed.

Lemma in_far_pairs : forall k u v, In (u, v) (far_pairs k) ->
  In u (corners k) /\ In v (corners k) /\ precedes u v = true /\ u <> v /\ ~ neighbours u v.
Proof.
  intros k u v H. apply filter_In in H. destruct H as [H H']. apply in_prod_iff in H. cbn [fst snd] in H'.
  apply andb_true_iff in H'. destruct H' as [Hprecedes Hfar]. repeat split; try tauto.
  - intros ->. unfold precedes in Hprecedes. rewrite !Nat.ltb_irrefl, andb_false_r in Hprecedes. discriminate.
  - rewrite <- adjacent_iff. now destruct (adjacent u v).
Qed.

(** Any family of unions of two squares that certifies p x p patches by unanimity has a member for each far pair. *)
Theorem a_family_of_two_square_masks_is_large : forall p s k (image : window) (family : list (window * window)),
  1 <= p -> 1 <= s -> p <= s + 1 ->
  (forall AB, In AB family -> at_most_a_mask p s (fst AB) /\ at_most_a_mask p s (snd AB)) ->
  (forall P Q, placed (p, p) image P -> placed (p, p) image Q ->
    exists AB, In AB family /\ hides (region_of [fst AB; snd AB]) (region_of [P]) /\
      hides (region_of [fst AB; snd AB]) (region_of [Q])) ->
  top image = 0 -> left image = 0 -> (k - 1) * s + p <= height image -> (k - 1) * s + p <= width image ->
  length (far_pairs k) <= length family.
Proof.
  intros p s k image family Hp Hs Hps Hsmall Htwo Htop Hleft Hheight Hwidth.
  set (serves := fun (AB : window * window) (q : corner * corner) =>
    hidden p s (fst AB) (snd AB) (fst q) /\ hidden p s (fst AB) (snd AB) (snd q)).
  assert (Hplaced : forall u, In u (corners k) -> placed (p, p) image (patch_at p s u)).
  { intros [i j] H. apply in_prod_iff in H. rewrite !in_seq in H. destruct H as [Hi Hj].
    assert (i * s <= (k - 1) * s) by (apply Nat.mul_le_mono_r; lia).
    assert (j * s <= (k - 1) * s) by (apply Nat.mul_le_mono_r; lia).
    unfold placed, inside. simpl. lia. }
  apply each_pair_needs_a_member_of_its_own with (serves := serves).
  - apply NoDup_filter, NoDup_list_prod; apply NoDup_list_prod; apply seq_NoDup.
  - intros [u v] Hq. apply in_far_pairs in Hq. destruct Hq as [Hu [Hv _]].
    destruct (Htwo _ _ (Hplaced u Hu) (Hplaced v Hv)) as [AB [HAB H]]. exists AB. split; [assumption|]. exact H.
  - intros [A B] [u v] [u' v'] HAB Hq Hq' [H1 H2] [H3 H4].
    apply in_far_pairs in Hq, Hq'. destruct Hq as [_ [_ [Hprec [Hne Hfar]]]], Hq' as [_ [_ [Hprec' [Hne' Hfar']]]].
    destruct (Hsmall (A, B) HAB) as [HA HB]. cbn [fst snd] in *.
    destruct (two_masks_serve_one_far_pair p s Hp Hs Hps A B HA HB u v u' v') as [[-> ->]|[-> ->]];
      auto. exfalso. unfold precedes in *. destruct v' as [a b], u' as [c d]. cbn [fst snd] in *.
    rewrite !orb_true_iff, !andb_true_iff, !Nat.ltb_lt, !Nat.eqb_eq in *. lia.
Qed.

(** The setting of the paper: 32 px patches at 224 px, and labels under unions of two masks of 64 px. Ours are 666. *)
Theorem certifying_32_px_at_224_px_takes_570_labels :
  forall (value : Type) (same : value -> value -> bool) (fill light dark : value)
    (family : list (window * window)) defense,
  let image := Window 0 0 224 224 in
  (forall a b, same a b = true <-> a = b) -> light <> fill -> dark <> fill -> light <> dark ->
  (forall AB, In AB family -> at_most_a_mask 32 33 (fst AB) /\ at_most_a_mask 32 33 (snd AB)) ->
  certifies_by_unanimity fill (map (fun AB => region_of [fst AB; snd AB]) family)
    (fun patch => exists P, placed (32, 32) image P /\ patch = region_of [P]) defense ->
  570 <= length family.
Proof.
  intros value same fill light dark family defense image Hsame Hlight Hdark Hdiffer Hsmall Hsound.
  replace 570 with (length (far_pairs 6)) by (vm_compute; reflexivity).
  apply (a_family_of_two_square_masks_is_large 32 33 6 image); auto; try (unfold image; simpl; lia).
  intros P Q HP HQ.
  destruct (certifying_one_patch_means_covering_two (pixels_of image) same Hsame fill light dark Hlight Hdark Hdiffer
    (map (fun AB => region_of [fst AB; snd AB]) family)
    (fun patch => exists P, placed (32, 32) image P /\ patch = region_of [P])) with
    (defense := defense) (P := region_of [P]) (Q := region_of [Q]) as [m [Hm Hhides]]; eauto.
  - intros patch [r c] [W [[Eh [Ew Hinside]] ->]] Hp. apply region_of_iff in Hp. destruct Hp as [w [[<-|[]] Hp]].
    apply in_window_iff in Hp. apply in_prod_iff. rewrite !in_seq. unfold inside in Hinside. cbn in *. lia.
  - apply in_map_iff in Hm. destruct Hm as [AB [<- HAB]]. eauto.
Qed.

(** ** Double-masking is such a defense, with 666 labels: so the bound speaks of something *)

(** Each pair of elements once, in one of its two orders; each element with itself, too. *)
Fixpoint pairs {A} (l : list A) : list (A * A) :=
  match l with [] => [] | a :: rest => map (pair a) l ++ pairs rest end.

Lemma pairs_hold_every_pair : forall {A} (l : list A) a b,
  In a l -> In b l -> In (a, b) (pairs l) \/ In (b, a) (pairs l).
Proof.
  intros A l a b. induction l as [|c rest IH]; cbn [pairs]; [intros []|]. rewrite !in_app_iff, !in_map_iff.
  intros [->|Ha] [->|Hb].
  - left. left. exists b. split; [reflexivity | now left].
  - left. left. exists b. split; [reflexivity | now right].
  - right. left. exists a. split; [reflexivity | now right].
  - destruct (IH Ha Hb); auto.
Qed.

Lemma pairs_are_of_elements : forall {A} (l : list A) a b, In (a, b) (pairs l) -> In a l /\ In b l.
Proof.
  intros A l a b. induction l as [|c rest IH]; cbn [pairs]; [intros []|]. rewrite in_app_iff, in_map_iff.
  intros [[d [[= <- <-] Hd]]|H]; [split; [now left | assumption]|]. apply IH in H. split; now right.
Qed.

Theorem double_masking_certifies_by_unanimity : forall (value : Type) (fill : value) base (R : threat pixel),
  covers (map (fun w => region_of [w]) base) R ->
  exists defense,
    certifies_by_unanimity fill (map (fun AB => region_of [fst AB; snd AB]) (pairs base)) R defense.
Proof.
  intros value fill base R Hcovers. set (masks := map (fun w => region_of [w]) base) in *.
  set (labels := fun F : classifier => table_of masks (fun m x => F (masked (value := value) fill m x))).
  exists (fun F => answer_of_double_masking masks (labels F) majority_label (seq 0 (length masks))).
  intros F HF x y Hunanimous x' Hattack.
  apply two_mask_correctness_certifies_double_masking with (R := R) (x := x); auto.
  - (* The labels are those of a classifier that sees visible pixels only. *)
    apply such_a_classifier_fills_a_table. intros m m' g h Hm Hsame. apply HF. intro p. unfold masked, fill_in.
    rewrite <- Hm. destruct (m p) eqn:E; auto.
  - (* Two-mask correctness: each pair of masks is in the family. *)
    intros i j Hi Hj. unfold masks in Hi, Hj. rewrite map_length in Hi, Hj.
    assert (Hmask : forall k, k < length base ->
      exists w, In w base /\ forall p, mask masks k p = in_window w p).
    { intros k Hk. exists (nth k base (Window 0 0 0 0)). split; [now apply nth_In|]. intro p. unfold mask, masks.
      rewrite nth_indep with (d' := region_of [Window 0 0 0 0]) by now rewrite map_length.
      rewrite map_nth with (f := fun w => region_of [w]). apply orb_false_r. }
    destruct (Hmask i Hi) as [a [Ha Hia]], (Hmask j Hj) as [b [Hb Hjb]]. unfold labels, table_of.
    destruct (pairs_hold_every_pair base a b Ha Hb) as [H|H];
      apply in_map with (f := fun AB => region_of [fst AB; snd AB]) in H; rewrite <- (Hunanimous _ H);
      apply HF; intro p; unfold masked, fill_in, union; rewrite Hia, Hjb; simpl; rewrite orb_false_r.
    + reflexivity.
    + now rewrite orb_comm.
Qed.

Theorem double_masking_certifies_32_px_at_224_px_with_666_labels : exists family : list (window * window),
  length family = 666 /\
  (forall AB, In AB family -> at_most_a_mask 32 33 (fst AB) /\ at_most_a_mask 32 33 (snd AB)) /\
  forall (value : Type) (fill : value), exists defense,
    certifies_by_unanimity fill (map (fun AB => region_of [fst AB; snd AB]) family)
      (fun patch => exists P, placed (32, 32) (Window 0 0 224 224) P /\ patch = region_of [P]) defense.
Proof.
  exists (pairs (grid (Window 0 0 224 224) (32, 32) (33, 33))). split; [vm_compute; reflexivity|]. split.
  - assert (Hsmall : forall w, In w (grid (Window 0 0 224 224) (32, 32) (33, 33)) -> at_most_a_mask 32 33 w).
    { intros w Hw. apply in_flat_map in Hw. destruct Hw as [t [_ Hw]]. apply in_map_iff in Hw.
      destruct Hw as [l [<- _]]. split; apply Nat.le_min_l. }
    intros [a b] HAB. apply pairs_are_of_elements in HAB. split; apply Hsmall; tauto.
  - intros value fill. apply double_masking_certifies_by_unanimity. intros patch [P [HP ->]].
    destruct (grid_covers (Window 0 0 224 224) (32, 32) (33, 33) P) as [m [Hm Hinside]]; [simpl; lia .. | exact HP |].
    apply In_nth with (d := Window 0 0 0 0) in Hm. destruct Hm as [i [Hi E]]. exists i.
    rewrite map_length. split; [assumption|]. unfold mask.
    rewrite nth_indep with (d' := region_of [Window 0 0 0 0]) by now rewrite map_length.
    rewrite map_nth with (f := fun w => region_of [w]), E. now apply a_window_hides_what_is_inside.
Qed.
